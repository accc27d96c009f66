"""Figures of a kernel that can be held against another kernel's.

All come from the compiler's schedule and its simulator: nothing ran on a TPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from pagemill.inspect import (
    Analysis,
    Counts,
    InspectError,
    Kernel,
    Loop,
    analyse,
    generation,
)

from benchmarks.tpu_work import Work


@dataclasses.dataclass(frozen=True)
class Subject:
    """A kernel under measurement.

    Attributes:
      name: what rows call it.
      place: of its spec function.
      pattern: what finds the kernel in its program.
      kwargs: of the spec function, beside the workload's.
      shared_by: cores that share its work, by generation; one where absent.
    """

    name: str
    place: str
    pattern: str
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    shared_by: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Figure:
    """A value, or None and why; a note may come with either."""

    value: float | None
    note: str = ""


@functools.cache
def _analyse(place: str, tpu: str, kwargs: str, *, simulate: bool) -> Analysis:
    found = analyse(
        place, tpu=tpu, kwargs=json.loads(kwargs), simulate=simulate
    )
    if not simulate or not found.simulator_error:
        return found
    # What XLA does around a kernel can end the simulator.
    return analyse(place, tpu=tpu, kwargs=json.loads(kwargs), alone=True)


def compiled(
    subject: Subject, tpu: str, work: Work, *, simulate: bool = False
) -> Analysis:
    """Of one kernel and workload, made once; raises InspectError."""
    kwargs = {**subject.kwargs, **dataclasses.asdict(work)}
    kwargs["simulated"] = simulate
    text = json.dumps(kwargs, sort_keys=True)
    return _analyse(subject.place, tpu, text, simulate=simulate)


def hbm_floor(tpu: str, work: Work) -> float:
    """Cycles in which K and V of the workload cross HBM."""
    return work.kv_bytes / generation(tpu).hbm_bytes_per_cycle


def cycles_per_sequence(
    subject: Subject, tpu: str, work: Work, counts: tuple[int, int]
) -> Figure:
    """Of a core, simulated: the difference between two of its counts."""
    found = []
    cores = subject.shared_by.get(tpu, 1)
    for seqs in (count * cores for count in counts):
        more = dataclasses.replace(work, seqs=seqs)
        figure = simulated_cycles(subject, tpu, more)
        if figure.value is None:
            return figure
        found.append(figure.value)
    return Figure((found[1] - found[0]) / (counts[1] - counts[0]))


def simulated_cycles(subject: Subject, tpu: str, work: Work) -> Figure:
    """Of the whole kernel; None when it does not compile or simulate."""
    try:
        found = compiled(subject, tpu, work, simulate=True)
        cycles = found.kernel(subject.pattern).simulated_cycles
    except InspectError as error:
        return Figure(None, _short(error))
    if cycles is None:
        why = found.simulator_error or "the simulator gave no estimate"
        return Figure(None, f"not simulated: {_short(why)}")
    return Figure(cycles)


def steady_bundles(subject: Subject, tpu: str, work: Work) -> Figure:
    """Bundles of compute and of starting copies, per 512 KV tokens.

    The multiplying loop's own, and, where that starts no copies, the piece of
    the nearest loop around it that starts most of them. A loop that does start
    copies counts by its straight piece that also multiplies: what it holds
    beside that are branches, most of them for the ends of a sequence; the note
    says how much is in them that does not multiply.
    """
    try:
        found = compiled(subject, tpu, work)
        kernel = found.kernel(subject.pattern)
    except InspectError as error:
        return Figure(None, _short(error))
    scale = 512 / found.known["loop_kv"]
    loop = kernel.multiplying
    if loop.own.dma_starts:
        return _straight(loop, scale)
    compute, issue = loop.own.cycles * scale, _issue(kernel) * scale
    return Figure(compute + issue, f"compute {compute:.0f} + issue {issue:.0f}")


def _straight(loop: Loop, scale: float) -> Figure:
    pieces = [one.counts for one in loop.segments]
    whole = [one for one in pieces if _starts(one) and one.mxu_cycles]
    if not whole:
        return Figure(None, "no piece of the loop both copies and multiplies")
    control = sum(one.bundles for one in pieces if not one.mxu_cycles)
    most = max(whole, key=lambda one: one.cycles)
    return Figure(
        most.cycles * scale,
        f"compute and issue in one piece; {control * scale:.0f} in branches",
    )


def _issue(kernel: Kernel) -> int:
    loop = kernel.multiplying
    if loop.own.dma_starts:
        return 0
    while loop.parent is not None:
        loop = kernel.loops[loop.parent]
        if loop.own.dma_starts:
            most = max(loop.segments, key=lambda one: _starts(one.counts))
            return most.counts.bundles
    return 0


def _starts(counts: Counts) -> int:
    return sum(counts.dma_starts.values())


def mxu_percent(subject: Subject, tpu: str, work: Work) -> Figure:
    """Of the MXUs' peak, in the multiplying loop."""
    try:
        found = compiled(subject, tpu, work)
        loop = found.kernel(subject.pattern).multiplying.own
    except InspectError as error:
        return Figure(None, _short(error))
    macs = found.known["loop_macs"]
    return Figure(
        100 * found.mxu_fraction(loop, macs),
        f"cap {100 * found.mxu_cap(loop, macs):.0f} %, busiest "
        f"{loop.bottleneck[0]} {loop.bottleneck[1]:.0%}",
    )


def spilled(subject: Subject, tpu: str, work: Work) -> Figure:
    """Vector registers that the multiplying loop stores for want of room."""
    try:
        found = compiled(subject, tpu, work)
    except InspectError as error:
        return Figure(None, _short(error))
    loop = found.kernel(subject.pattern).multiplying.own
    return Figure(loop.vector_spills, f"loaded back {loop.vector_fills}")


def compile_seconds(subject: Subject, tpu: str, work: Work) -> Figure:
    """Lowering and compiling, on this machine."""
    try:
        found = compiled(subject, tpu, work)
    except InspectError as error:
        return Figure(None, _short(error))
    return Figure(found.lower_seconds + found.compile_seconds)


def _short(error: object) -> str:
    return " ".join(str(error).split())[:240]
