"""Reads what a kernel holds in VMEM and SMEM."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

from pagemill.inspect.report import Allocation

_LINE = re.compile(
    r"#allocation\w+ \[shape = '(?P<shape>[^']*)', space=(?P<space>\w+), "
    r"size = (?P<size>0x[0-9a-f]+|\d+),(?P<more>.*?)tag = '(?P<tag>[^']*)'"
)


def read_allocations(path: pathlib.Path | None) -> tuple[Allocation, ...]:
    """The kernel's own, from the head of a compiler pass's dump, largest first.

    Windows, scratch, prefetched scalars and spill slots are "scoped"; what is
    not belongs to the whole chip.
    """
    if path is None:
        return ()
    found = sorted(_scoped(path), key=lambda one: -one.num_bytes)
    return tuple(found)


def _scoped(path: pathlib.Path) -> Iterator[Allocation]:
    began = False
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            found = _LINE.search(line)
            if found is None:
                if began and not line.strip():
                    return
                continue
            if found["space"] in {"vmem", "smem"} and "scoped" in found["more"]:
                began = True
                yield Allocation(
                    found["space"],
                    int(found["size"], 0),
                    found["shape"],
                    found["tag"],
                )
