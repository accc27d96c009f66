"""Reads the final VLIW bundles of a kernel, and what each one holds.

A line is ``ADDRESS [MARK] : [>...] { instruction ;; instruction ... }``: the
marks name loops' headers and bodies, and as many ``>`` as loops are open say
how deep the bundle lies. A comment inside a bundle may hold newlines.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
from collections.abc import Mapping

_LINE = re.compile(
    r"^\s*(?P<address>0x[0-9a-f]+|\d+)\s+"
    r"(?:(?P<mark>LH|LB|LE|PB|PF|CT)\b)?\s*:\s*(?P<depth>>*)\s*(?=\{)"
)
_OPCODE = re.compile(r"= ([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)")
_MATMUL = re.compile(r"= vmatmul\.([\w.]+)")
_DMA = re.compile(r"= dma\.(\w+)")
# Waits come with a result and without one.
_WAIT = re.compile(r"(= )?\bdma\.done\.wait\b")
_SPILL = re.compile(r"= (vst|vld|sst|sld)[^;{}]*?_spill\]")
_TARGET = re.compile(r"target bundleno = (\d+)")
_8_BIT = ("s8", "u8", "i8")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """What one cycle issues.

    Attributes:
      address: its number in the program.
      mark: LH or LB where a loop's header or body begins, and others; or "".
      depth: loops it lies in.
      opcodes: how often each is issued.
      matmuls: matmul instructions by type of their LHS.
      dma_starts: copies started, by the engine's opcode.
      dma_waits: waits for copies.
      spills: vector and scalar registers stored (vst, sst) and loaded back.
      targets: addresses that its branches go to.
    """

    address: int
    mark: str
    depth: int
    opcodes: Mapping[str, int]
    matmuls: Mapping[str, int]
    dma_starts: Mapping[str, int]
    dma_waits: int
    spills: Mapping[str, int]
    targets: tuple[int, ...]


def read_bundles(path: pathlib.Path) -> list[Bundle]:
    """All bundles of a ``final_bundles`` dump, by address."""
    heads: list[tuple[int, str, int]] = []
    texts: list[str] = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            found = _LINE.match(line)
            if found is None:
                if texts:
                    texts[-1] += line
                continue
            text, depth = line[found.end() :], len(found["depth"])
            if text.startswith("{}") and heads:  # An empty one has no depth.
                depth = heads[-1][2]
            heads.append((int(found["address"], 0), found["mark"] or "", depth))
            texts.append(text)
    return [
        _bundle(*head, text) for head, text in zip(heads, texts, strict=True)
    ]


def _bundle(address: int, mark: str, depth: int, text: str) -> Bundle:
    dmas = collections.Counter(_DMA.findall(text))
    waits = dmas.pop("done", 0)
    waits += sum(not found[1] for found in _WAIT.finditer(text))
    return Bundle(
        address,
        mark,
        depth,
        opcodes=collections.Counter(_OPCODE.findall(text)),
        matmuls=collections.Counter(
            _lhs_type(suffix) for suffix in _MATMUL.findall(text)
        ),
        dma_starts=dmas,
        dma_waits=waits,
        spills=collections.Counter(_SPILL.findall(text)),
        targets=tuple(int(found) for found in _TARGET.findall(text)),
    )


def _lhs_type(suffix: str) -> str:
    """Of a matmul's opcode; "?" when it names none."""
    for part in suffix.split("."):
        if part in {"f32", "bf16", *_8_BIT} or part.startswith("f8"):
            return part
    return "?"
