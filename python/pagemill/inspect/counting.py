"""Adds up what a kernel's bundles hold, loop by loop."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence

from pagemill.inspect.bundles import Bundle
from pagemill.inspect.generations import Generation
from pagemill.inspect.loops import find_loops, own_bundles, segments
from pagemill.inspect.report import Counts, Loop, Segment
from pagemill.inspect.utilisation import Utilisation


class Counter:
    """Counts of any of a program's bundles."""

    def __init__(
        self,
        bundles: Sequence[Bundle],
        utilisation: Utilisation,
        tpu: Generation,
    ) -> None:
        self._bundles = bundles
        self._tpu = tpu
        # Rows that do not belong to these bundles say nothing of them.
        fits = len(utilisation.used) == len(bundles)
        self._capacity = utilisation.capacity if fits else {}
        self._used = utilisation.used if fits else []

    def total(self) -> Counts:
        """Of the whole program."""
        return self.of(range(len(self._bundles)))

    def loops(self) -> tuple[Loop, ...]:
        """Of every loop, and of its straight pieces."""
        found = find_loops(self._bundles)
        return tuple(
            Loop(
                index,
                loop.parent,
                loop.depth,
                self._bundles[loop.first].address,
                loop.end - loop.first,
                self.of(own := own_bundles(found, index)),
                tuple(self._segments(own)),
            )
            for index, loop in enumerate(found)
        )

    def _segments(self, own: list[int]) -> Iterable[Segment]:
        for piece in segments(self._bundles, own):
            first = self._bundles[piece[0]]
            yield Segment(first.address, first.mark, self.of(piece))

    def of(self, places: Sequence[int]) -> Counts:
        """Of the bundles at these places."""
        chosen = [self._bundles[i] for i in places]
        matmuls = _sum(bundle.matmuls for bundle in chosen)
        busy = sum(
            count * self._tpu.matmul_cycles(dtype)
            for dtype, count in matmuls.items()
        )
        spills = _sum(bundle.spills for bundle in chosen)
        opcodes = _sum(bundle.opcodes for bundle in chosen)
        used = [self._used[i] for i in places] if self._used else []
        return Counts(
            bundles=len(chosen),
            empty=sum(not any(row) for row in used),
            capacity=self._capacity,
            slots={
                name: sum(row[column] for row in used)
                for column, name in enumerate(self._capacity)
            },
            matmuls=dict(matmuls),
            mxu_cycles=busy / self._tpu.mxus,
            issued_macs=int(busy * self._tpu.macs_per_cycle / self._tpu.mxus),
            dma_starts=dict(_sum(bundle.dma_starts for bundle in chosen)),
            dma_waits=sum(bundle.dma_waits for bundle in chosen),
            vector_spills=spills["vst"],
            vector_fills=spills["vld"],
            scalar_spills=spills["sst"],
            scalar_fills=spills["sld"],
            opcodes=dict(opcodes.most_common()),
        )


def _sum(counters: Iterable[Mapping[str, int]]) -> collections.Counter[str]:
    total = collections.Counter[str]()
    for counter in counters:
        if counter:
            total.update(counter)
    return total
