"""A request trace through planner, pool and validator, timed step by step.

Requests come as fast as they are served, in the trace's order: decodes first,
then prefill chunks up to the token budget. Only calls into Pagemill are timed.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pagemill

from demo import traces

BLOCK = 512  # tokens that a hash id of the trace stands for


@dataclasses.dataclass
class Running:
    """A request that was admitted."""

    seq: pagemill.Sequence
    prompt: int
    output: int
    number: int
    planned: int  # tokens with a place, the cached ones included

    @property
    def next_tokens(self) -> int:
        """Tokens it could bring to the next step."""
        return max(self.prompt - self.planned, 1)

    @property
    def finished(self) -> bool:
        """All of its output has been planned."""
        return self.planned >= self.prompt + self.output


@dataclasses.dataclass
class Outcome:
    """What a replay found; times in microseconds."""

    step_us: list[float] = dataclasses.field(default_factory=list)
    pages_in_use: list[int] = dataclasses.field(default_factory=list)
    sequences: list[int] = dataclasses.field(default_factory=list)
    tokens: int = 0
    violations: int = 0
    finished: int = 0
    preempted: int = 0
    too_long: int = 0
    hit_rate: float = 0.0
    ideal_hit_rate: float = 0.0


class Prompts:
    """Token ids: equal hash ids at the same place mean an equal prefix."""

    def __init__(self, path: pathlib.Path) -> None:
        self.requests = traces.load(path)
        self._hash_ids: list[list[int]] | None = None
        if path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                found = [json.loads(line) for line in lines if line.strip()]
            if all("hash_ids" in fields for fields in found):
                self._hash_ids = [fields["hash_ids"] for fields in found]

    def __call__(self, number: int) -> Any:
        """i32[prompt] of a request."""
        length = self.requests[number].prompt
        if self._hash_ids is None:  # nothing is known to be equal
            return (number * 131 + np.arange(length)).astype(np.int32) | 1 << 30
        ids = np.asarray(self._hash_ids[number], np.int64)
        tokens = (ids[:, None] * BLOCK + np.arange(BLOCK)).ravel()[:length]
        return tokens.astype(np.int32)


class Replay:
    """Runs the loop."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        total_num_pages: int,
        page_size: int = 16,
        max_num_tokens: int = 2048,
        max_num_seqs: int = 256,
        pages_per_seq: int = 8192,
    ) -> None:
        self.prompts = prompts
        self.pool = pagemill.PagePool(total_num_pages, page_size)
        self.planner = pagemill.Planner(
            self.pool,
            max_num_tokens,
            max_num_seqs,
            pages_per_seq,
            ring=2,
            keep_rows=True,
        )
        self.waiting = collections.deque(range(len(prompts.requests)))
        self.running: list[Running] = []
        self.outcome = Outcome()
        self._spent = 0
        self._seen: set[bytes] = set()
        self._ideal = self._looked_up = 0

    def run(self, max_steps: int | None = None) -> Outcome:
        """Serves the trace, or its first steps."""
        while self.running or self.waiting:
            if max_steps is not None and len(self.outcome.step_us) >= max_steps:
                break
            self._spent = 0
            self._admit()
            if self.running:
                self._step()
        for one in self.running:
            self.pool.close(one.seq)
        self.pool.audit()
        self.outcome.hit_rate = self.pool.stats().hit_rate
        self.outcome.ideal_hit_rate = self._ideal / max(self._looked_up, 1)
        return self.outcome

    def _timed(self, call: Callable[..., Any], *args: Any) -> Any:
        start = time.perf_counter_ns()
        try:
            return call(*args)
        finally:
            self._spent += time.perf_counter_ns() - start

    def _admit(self) -> None:
        planner, pool = self.planner, self.pool
        longest = (
            min(planner.pages_per_seq, pool.total_num_pages) * pool.page_size
        )
        while self.waiting and len(self.running) < planner.max_num_seqs:
            request = self.prompts.requests[self.waiting[0]]
            if request.prompt + request.output > longest:
                self.waiting.popleft()
                self.outcome.too_long += 1
                continue
            claimed = sum(
                max(one.prompt - one.planned, 0) for one in self.running
            )
            need = (claimed + request.prompt) // pool.page_size + 2
            unfinished = sum(one.planned < one.prompt for one in self.running)
            if unfinished > 1 or (
                self.running and need > pool.num_available_pages
            ):
                return
            number = self.waiting.popleft()
            tokens = self.prompts(number)
            self._count_ideal(tokens)
            seq = self._timed(pool.open, tokens)
            self.running.append(
                Running(
                    seq,
                    request.prompt,
                    request.output,
                    number,
                    seq.num_cached_tokens,
                )
            )

    def _count_ideal(self, tokens: Any) -> None:
        """What a cache without bounds, filled at once, would have had."""
        size = self.pool.page_size
        self._looked_up += len(tokens)
        hit, found = 0, True
        for end in range(size, len(tokens) + 1, size):
            # A page of the trace's blocks is known by its last token, which no
            # other prefix ends with, and by where it stands.
            key = tokens[end - 1 : end].tobytes() + end.to_bytes(4, "little")
            found = found and key in self._seen and end < len(tokens)
            hit += size if found else 0
            self._seen.add(key)
        self._ideal += hit

    def _share_out(self) -> list[tuple[Running, int]]:
        budget = self.planner.max_num_tokens
        work = []
        for decodes in (True, False):
            for one in self.running:
                wanted = one.next_tokens
                if (one.planned >= one.prompt) == decodes and budget:
                    count = min(wanted, budget)
                    budget -= count
                    work.append((one, count))
        return work

    def _step(self) -> None:
        while True:
            work = self._share_out()
            handles = np.array([one.seq.handle for one, _ in work], np.int64)
            counts = np.array([count for _, count in work], np.int32)
            try:
                step = self._timed(self.planner.step, handles, counts)
                break
            except pagemill.CapacityError:
                self._preempt()
        try:
            self._timed(pagemill.validate, step.batch)
        except pagemill.PagemillError as error:
            self.outcome.violations += len(error.violations)
        self._timed(step.commit)
        self._timed(self._retire, step)
        for one, count in work:
            one.planned += count
        self._finish()
        stats = self.pool.stats()
        self.outcome.step_us.append(self._spent / 1e3)
        self.outcome.pages_in_use.append(stats.in_use)
        self.outcome.sequences.append(len(work))
        self.outcome.tokens += int(counts.sum())

    @staticmethod
    def _retire(step: pagemill.Step) -> None:
        step.retire(done=True)

    def _finish(self) -> None:
        still = []
        for one in self.running:
            if one.finished:
                self._timed(self.pool.close, one.seq)
                self.outcome.finished += 1
            else:
                still.append(one)
        self.running = still

    def _preempt(self) -> None:
        victim = self.running.pop()
        self._timed(self.pool.close, victim.seq)
        self.waiting.appendleft(victim.number)
        self.outcome.preempted += 1


def series(values: list[int], points: int = 50) -> Iterator[int]:
    """The largest value of each of some stretches, for a plot."""
    size = max(1, -(-len(values) // points))
    for start in range(0, len(values), size):
        yield max(values[start : start + size])
