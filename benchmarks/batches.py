"""Batches and pools as the benchmarks need them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pagemill

PAGE_SIZE = 16


def decode_batch(
    num_seqs: int, pages_per_seq: int, seed: int = 0
) -> pagemill.RaggedBatch:
    """One new token each; half of each row is live, pages lie anywhere."""
    rng = np.random.default_rng(seed)
    live = pages_per_seq // 2
    total = num_seqs * live
    table = np.full((num_seqs, pages_per_seq), -1, np.int32)
    table[:, :live] = rng.permutation(total).reshape(num_seqs, live)
    return pagemill.RaggedBatch(
        kv_lens=np.full(num_seqs, live * PAGE_SIZE, np.int32),
        page_indices=table,
        cu_q_lens=np.arange(num_seqs + 1, dtype=np.int32),
        num_seqs=np.array([num_seqs], np.int32),
        page_size=PAGE_SIZE,
        total_num_pages=total,
        max_num_tokens=num_seqs,
    )


def with_faults(
    batch: pagemill.RaggedBatch, count: int, seed: int = 1
) -> pagemill.RaggedBatch:
    """A copy with ``count`` faults: lengths, page ids and shared pages."""
    rng = np.random.default_rng(seed)
    rows = rng.choice(batch.max_num_seqs, count, replace=False)
    table, lens = batch.page_indices.copy(), batch.kv_lens.copy()
    live = lens // PAGE_SIZE
    for i, row in enumerate(rows):
        if i % 3 == 0:
            lens[row] = 0  # fewer keys than queries
        elif i % 3 == 1:
            table[row, rng.integers(live[row])] = batch.total_num_pages + i
        else:
            table[row, 0] = table[row, live[row] - 1]  # written and read
    return dataclasses.replace(batch, page_indices=table, kv_lens=lens)


class SteadyDecode:
    """A persistent batch: every call decodes one token of each sequence."""

    def __init__(self, num_seqs: int, pages_per_seq: int = 512) -> None:
        pages = num_seqs * pages_per_seq
        self.pool = pagemill.PagePool(
            min(pages, 2**31 // PAGE_SIZE - 1), PAGE_SIZE
        )
        self.planner = pagemill.Planner(
            self.pool, num_seqs, num_seqs, pages_per_seq, ring=2
        )
        self.capacity = pages_per_seq * PAGE_SIZE
        self.seqs = [self.pool.open() for _ in range(num_seqs)]
        self.handles = np.array([s.handle for s in self.seqs], np.int64)
        self.counts = np.ones(num_seqs, np.int32)
        self._stagger()

    def _stagger(self) -> None:
        """Lengths such that each step crosses a 16th of the page borders."""
        filler = pagemill.Planner(
            self.pool,
            len(self.seqs) * PAGE_SIZE,
            len(self.seqs),
            self.capacity // PAGE_SIZE,
        )
        counts = 1 + np.arange(len(self.seqs), dtype=np.int32) % PAGE_SIZE
        filler.plan(self.handles, counts)
        filler.commit()

    def __call__(self) -> None:
        """One step: planned, committed and retired."""
        step = self.planner.step(self.handles, self.counts)
        step.commit()
        step.retire(done=True)


class Rebuild:
    """Every call writes every row anew: two sets of sequences take turns."""

    def __init__(self, num_seqs: int, pages_per_seq: int) -> None:
        tokens = pages_per_seq // 2 * PAGE_SIZE - 64
        self.pool = pagemill.PagePool(
            num_seqs * (pages_per_seq + 900), PAGE_SIZE
        )
        filler = pagemill.Planner(
            self.pool, tokens * num_seqs, num_seqs, pages_per_seq
        )
        self.planner = pagemill.Planner(
            self.pool, num_seqs, num_seqs, pages_per_seq, ring=1
        )
        self.sets = []
        for _ in range(2):
            handles = np.array(
                [self.pool.open().handle for _ in range(num_seqs)], np.int64
            )
            filler.plan(handles, np.full(num_seqs, tokens, np.int32))
            filler.commit()
            self.sets.append(handles)
        self.ones = np.ones(num_seqs, np.int32)
        self.turn = 0

    def __call__(self) -> Any:
        """One step of the other set."""
        self.turn ^= 1
        step = self.planner.step(self.sets[self.turn], self.ones)
        step.commit()
        step.retire(done=True)
        return step
