"""Rows of a benchmark: measured, compared with a peer, judged, printed."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure; smaller is better unless ``larger`` is set.

    Attributes:
      name: what was measured.
      value: the figure; None when there is none to be had.
      unit: of value, peer, must and aim.
      peer_name: what it is compared with; None without one.
      peer: the peer's figure in the same run; None when it is absent.
      must: the worst value that is good enough; None for information only.
      aim: what we want.
      least_ratio: by how much the peer must be worse at least.
      larger: larger is better.
      note: why a peer is absent, and the like.
    """

    name: str
    value: float | None
    unit: str
    peer_name: str | None = None
    peer: float | None = None
    must: float | None = None
    aim: float | None = None
    least_ratio: float | None = None
    larger: bool = False
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times worse the peer is."""
        if self.peer is None or self.value is None:
            return None
        if self.larger:
            return self.value / self.peer
        return self.peer / self.value

    @property
    def met(self) -> bool | None:
        """Whether every 'must' of the row holds; None if there is none to see.

        Without its peer a row that must be ahead of it is not judged.
        """
        if self.must is None and self.least_ratio is None:
            return None
        if self.value is None:
            return False
        if self.least_ratio is not None:
            if self.ratio is None:
                return None
            if self.ratio < self.least_ratio:
                return False
        if self.must is None:
            return True
        return (
            self.value >= self.must if self.larger else self.value <= self.must
        )

    def as_json(self) -> dict[str, Any]:
        """All that is known of the row."""
        return dataclasses.asdict(self) | {
            "ratio": self.ratio,
            "met": self.met,
        }


def times(call: Callable[[], Any], count: int, warm_up: int = 3) -> list[float]:
    """Microseconds of each of ``count`` calls, without garbage collection."""
    for _ in range(warm_up):
        call()
    gc.collect()
    gc.disable()
    try:
        found = []
        for _ in range(count):
            start = time.perf_counter_ns()
            call()
            found.append((time.perf_counter_ns() - start) / 1e3)
    finally:
        gc.enable()
    return found


def median_us(call: Callable[[], Any], count: int, warm_up: int = 3) -> float:
    """The median of :func:`times`."""
    return statistics.median(times(call, count, warm_up))


def interleaved_us(
    calls: Iterable[tuple[str, Callable[[], Any], int]], rounds: int = 5
) -> dict[str, float]:
    """Medians of several calls, taken in turns so that all see one machine.

    Args:
      calls: (name, call, how many calls a round).
      rounds: how often each has its turn.
    """
    calls = list(calls)
    found: dict[str, list[float]] = {name: [] for name, _, _ in calls}
    for _ in range(rounds):
        for name, call, count in calls:
            found[name] += times(call, count)
    return {name: statistics.median(values) for name, values in found.items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    """With the options that every benchmark has."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--json", action="store_true", help="rows as JSON, nothing else"
    )
    made.add_argument(
        "--only", default="", metavar="TEXT", help="rows whose name has TEXT"
    )
    return made


def report(rows: list[Row], *, as_json: bool, **more: Any) -> int:
    """Prints the rows; exit code 1 when one misses its must."""
    if as_json:
        json.dump(
            {"rows": [row.as_json() for row in rows], **more},
            sys.stdout,
            indent=1,
        )
        print()
    else:
        for row in rows:
            print(_line(row))
    missed = [row.name for row in rows if row.met is False]
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def _line(row: Row) -> str:
    judged = {None: "    ", True: "ok  ", False: "MISS"}[row.met]
    value = "absent" if row.value is None else f"{row.value:.3f}"
    text = f"{judged} {row.name:44s} {value:>10s} {row.unit:3s}"
    if row.must is not None:
        text += f"  must {row.must:g}"
    if row.aim is not None:
        text += f"  aim {row.aim:g}"
    if row.peer is not None:
        ratio = "" if row.ratio is None else f" ({row.ratio:.1f}x)"
        text += f"  {row.peer_name} {row.peer:.3f}{ratio}"
    return f"{text}  {row.note}" if row.note else text
