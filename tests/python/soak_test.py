"""A long run of every pool and planner call: invariants hold, memory is flat.

The environment sets the number of calls; //tests/python:long_soak_test makes a
million.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
from collections.abc import Callable

import numpy as np
import pytest
from pagemill import (
    CapacityError,
    LeaseError,
    PagemillError,
    PagePool,
    Planner,
    Sequence,
    Step,
)

CALLS = int(os.environ.get("PAGEMILL_SOAK_CALLS", "40000"))
MAX_GROWTH = 6 * 2**20  # bytes; a leak of ten bytes a call would show
PAGES = 256


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


class Load:
    """Requests that come, grow, are disturbed in all ways, and go."""

    def __init__(self, windows: tuple[int | None, ...], seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = PagePool(
            PAGES, 4, sliding_windows=windows, secret=b"s", max_events=64
        )
        self.planner = Planner(
            self.pool, 256, 32, PAGES, ring=3, keep_rows=True, track_delta=True
        )
        self.live: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.steps: list[Step] = []
        self.calls = 0
        self.repeats = 0
        self.handles = np.empty(0, np.int64)

    def run(self, calls: int) -> None:
        actions: list[Callable[[], None]] = [
            self.open,
            self.close,
            self.fork,
            self.truncate,
            self.preempt,
            self.extend,
            self.swap,
            self.whole,
        ]
        end = self.calls + calls
        audit = self.calls
        while self.calls < end:
            if self.repeats == 0:
                self.random.choice(actions)()
                self.pool.take_page_copies()
                self.choose()
                self.calls += 2
            self.repeats -= 1
            self.step()
            if self.calls >= audit:
                self.pool.audit()
                audit += 2000

    def pick(self) -> Sequence:
        if not self.live:
            self.open()
        return self.random.choice(self.live)

    def open(self) -> None:
        if len(self.live) >= 40:
            self.close()
        prompt = [self.random.randrange(2)] * self.random.randrange(40)
        self.live.append(self.pool.open(prompt, salt=b"ab"[len(prompt) % 2 :]))

    def close(self) -> None:
        seq = self.pick()
        self.live.remove(seq)
        self.pool.close(seq)

    def fork(self) -> None:
        with contextlib.suppress(CapacityError):
            self.live.append(self.pool.fork(self.pick()))

    def truncate(self) -> None:
        seq = self.pick()
        with contextlib.suppress(CapacityError, PagemillError):
            self.pool.truncate(seq, self.random.randint(0, seq.length))

    def preempt(self) -> None:
        seq = self.pick()
        self.pool.preempt(seq)
        self.pool.resume(seq)

    def extend(self) -> None:
        seq = self.pick()
        self.pool.extend(seq, [1] * min(seq.length, 9))

    def swap(self) -> None:
        if self.swapped and self.random.random() < 0.7:
            with contextlib.suppress(CapacityError):
                self.pool.swap_in(self.swapped[0])
                self.live.append(self.swapped.pop(0))
            return
        seq = self.pick()
        with contextlib.suppress(PagemillError):
            self.pool.begin_swap_out(seq)
            self.pool.end_swap_out(seq)
            self.live.remove(seq)
            self.swapped.append(seq)

    def whole(self) -> None:
        self.pool.take_events()
        self.pool.stats()
        if self.random.random() < 0.1:
            self.pool.clear_cache()

    def choose(self) -> None:
        count = self.random.randint(0, min(len(self.live), 30))
        chosen = self.random.sample(self.live, count)
        self.handles = np.array([s.handle for s in chosen], np.int64)
        self.counts = np.array(
            [self.random.choice((1, 1, 1, 2, 7)) for _ in chosen], np.int32
        )
        self.repeats = self.random.choice((1, 1, 4, 12))
        if self.repeats > 1:
            self.counts[:] = 1

    def step(self) -> None:
        try:
            step = self.planner.step(self.handles, self.counts)
        except (CapacityError, LeaseError):
            self.repeats = 0
            for seq in self.live[:3]:
                self.pool.close(seq)
            del self.live[:3]
            self.drain(0)
        else:
            self.steps.append(step)
            self.drain(self.random.randrange(3))
        self.calls += 3

    def drain(self, keep: int) -> None:
        while len(self.steps) > keep:
            step = self.steps.pop(0)
            how = self.random.randrange(6)
            try:
                if how == 0:
                    step.abort()
                elif how == 1:
                    step.commit([1] * len(step.order))
                else:
                    step.commit()
            except PagemillError:  # planned again or forked since
                step.commit()
            step.retire(done=True)

    def end(self) -> None:
        self.drain(0)
        for seq in self.live + self.swapped:
            self.pool.close(seq)
        self.pool.take_page_copies()
        self.pool.clear_cache()
        self.pool.audit()
        assert self.pool.num_free_pages == PAGES


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
def test_soak(windows: tuple[int | None, ...]) -> None:
    load = Load(windows, seed=1)
    load.run(CALLS // 5)  # warm
    before = resident_bytes()
    load.run(CALLS // 2)
    assert resident_bytes() - before < MAX_GROWTH
    load.end()
