"""Reads how many of its slots each bundle uses."""

from __future__ import annotations

import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Utilisation:
    """Slots of a bundle, and which are used.

    MATMUL and MATPUSH say for how many cycles a unit is occupied; the other
    slots count instructions. A name with a colon is part of the slot before it.

    Attributes:
      capacity: how many a bundle has, by name.
      used: per bundle, how many it uses, in capacity's order.
    """

    capacity: dict[str, int]
    used: list[list[int]]


def read_utilisation(path: pathlib.Path | None) -> Utilisation:
    """Of a ``static-per-bundle-utilization`` dump; empty without one."""
    if path is None:
        return Utilisation({}, [])
    lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    capacity: dict[str, int] = {}
    used: list[list[int]] = []
    in_rows = False
    for i, line in enumerate(lines):
        if line.startswith("=="):
            in_rows = line.startswith("== UTILIZATION")
        elif line.startswith("MATMUL"):
            names = [name.strip() for name in line.split(",")]
            sizes = [int(size) for size in lines[i + 1].split()]
            capacity = dict(zip(names, sizes, strict=True))
        elif in_rows and line[:1].isdigit():
            used.append([int(count) for count in line.split()])
    return Utilisation(capacity, used)
