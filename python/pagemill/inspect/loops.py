"""Finds a program's loops, and the straight pieces of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from pagemill.inspect.bundles import Bundle


@dataclasses.dataclass
class LoopSpan:
    """A loop's place: bundles [first, end), those of inner loops included.

    The one at index 0, of depth 0, is the whole program.
    """

    parent: int | None
    depth: int
    first: int
    end: int


def find_loops(bundles: Sequence[Bundle]) -> list[LoopSpan]:
    """All loops, outer ones first."""
    loops = [LoopSpan(None, 0, 0, len(bundles))]
    open_loops = [0]
    for i, bundle in enumerate(bundles):
        while len(open_loops) - 1 > bundle.depth or (
            len(open_loops) - 1 == bundle.depth > 0 and _starts(bundles, i)
        ):
            loops[open_loops.pop()].end = i
        while len(open_loops) - 1 < bundle.depth:
            depth = len(open_loops)
            loops.append(LoopSpan(open_loops[-1], depth, i, len(bundles)))
            open_loops.append(len(loops) - 1)
    return loops


def _starts(bundles: Sequence[Bundle], i: int) -> bool:
    """Whether another loop begins here; a body after its header does not."""
    mark = bundles[i].mark
    return mark == "LH" or (mark == "LB" and bundles[i - 1].mark != "LH")


def own_bundles(loops: Sequence[LoopSpan], index: int) -> list[int]:
    """A loop's bundles without those of the loops in it."""
    loop = loops[index]
    inner = set[int]()
    for other in loops:
        if other.parent == index:
            inner.update(range(other.first, other.end))
    return [i for i in range(loop.first, loop.end) if i not in inner]


def segments(bundles: Sequence[Bundle], own: list[int]) -> Iterator[list[int]]:
    """Cuts a loop's own bundles at marks and at the targets of branches."""
    targets = {target for bundle in bundles for target in bundle.targets}
    piece: list[int] = []
    for i in own:
        marked = bundles[i].mark or bundles[i].address in targets
        if piece and (marked or i != piece[-1] + 1):
            yield piece
            piece = []
        piece.append(i)
    if piece:
        yield piece
