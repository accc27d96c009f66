"""Which requests run, and how many tokens each brings to a step."""

from __future__ import annotations

import collections
import dataclasses
import time

import pagemill

from demo.traces import Request


@dataclasses.dataclass
class Running:
    """A request with a sequence in the pool."""

    request: Request
    seq: pagemill.Sequence
    generated: int = 0

    @property
    def remaining_prompt(self) -> int:
        """Prompt tokens not yet planned."""
        return max(self.request.prompt - self.seq.length, 0)

    @property
    def finished(self) -> bool:
        """All of its output was generated."""
        return self.generated >= self.request.output


@dataclasses.dataclass
class Scheduler:
    """First come, first served; decodes before prefill chunks.

    When the pool is short, the youngest request gives its pages back and
    waits to be computed again.
    """

    pool: pagemill.PagePool
    planner: pagemill.Planner
    waiting: collections.deque[Request]
    running: list[Running] = dataclasses.field(default_factory=list)
    too_long: list[Request] = dataclasses.field(default_factory=list)
    preemptions: int = 0
    finished: int = 0
    plan_seconds: float = 0.0

    def plan(self) -> tuple[list[tuple[Running, int]], pagemill.RaggedBatch]:
        """The step's rows, in the batch's order, and its metadata."""
        self._admit()
        while True:
            work = self._share_out()
            requests = [(running.seq, count) for running, count in work]
            start = time.perf_counter()
            try:
                batch = self.planner.plan(requests)
                self.plan_seconds = time.perf_counter() - start
            except pagemill.CapacityError:
                self._preempt()
                continue
            return [work[i] for i in self.planner.order], batch

    def finish(self, work: list[tuple[Running, int]]) -> None:
        """Counts the tokens generated; closes what is done."""
        for running, _ in work:
            if running.remaining_prompt == 0:
                running.generated += 1
            if running.finished:
                self.pool.close(running.seq)
                self.running.remove(running)
                self.finished += 1

    def close_all(self) -> None:
        """Gives every page back."""
        while self.running:
            self.pool.close(self.running.pop().seq)

    @property
    def done(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self.running and not self.waiting

    @property
    def capacity(self) -> int:
        """Tokens of the longest request that can be served."""
        pages = min(self.pool.total_num_pages, self.planner.pages_per_seq)
        return pages * self.pool.page_size

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.planner.max_num_seqs:
            request = self.waiting[0]
            if request.prompt + request.output > self.capacity:
                self.too_long.append(self.waiting.popleft())
                continue
            if self.running and self._pages(request.prompt) > self._unclaimed():
                return
            self.waiting.popleft()
            self.running.append(Running(request, self.pool.open()))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_size)

    def _unclaimed(self) -> int:
        """Free pages less what the prompts admitted so far still need."""
        claimed = sum(
            self._pages(running.request.prompt)
            - self._pages(running.seq.length)
            for running in self.running
            if running.remaining_prompt
        )
        return self.pool.num_free_pages - claimed

    def _share_out(self) -> list[tuple[Running, int]]:
        budget = self.planner.max_num_tokens
        counts: dict[int, int] = {}
        for running in self.running:
            if running.remaining_prompt == 0 and budget:
                counts[id(running)] = 1
                budget -= 1
        for running in self.running:
            chunk = min(running.remaining_prompt, budget)
            if chunk:
                counts[id(running)] = chunk
                budget -= chunk
        return [
            (running, counts[id(running)])
            for running in self.running
            if id(running) in counts
        ]

    def _preempt(self) -> None:
        victim = self.running.pop()
        self.pool.close(victim.seq)
        self.waiting.appendleft(victim.request)
        self.preemptions += 1
