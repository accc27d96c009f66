"""A step's metadata rebuilt in NumPy: what TPU serving stacks do each step."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Step:
    """What pagemill.Planner writes; views of memory that the next step reuses.

    Attributes:
        kv_lens: i32[max_num_seqs].
        page_indices: i32[max_num_seqs, pages_per_seq].
        cu_q_lens: i32[max_num_seqs + 1].
        num_seqs: i32[1].
        distribution: i32[3].
        slot_mapping: i32[max_num_tokens].
        order: i64[num_seqs], row r is request order[r].
    """

    kv_lens: Array
    page_indices: Array
    cu_q_lens: Array
    num_seqs: Array
    distribution: Array
    slot_mapping: Array
    order: Array


class NumpyPlanner:
    """Keeps an engine's rows and gathers those of a step, without checks.

    Pages are somebody else's business: before a step, the caller writes the new
    page ids of a row into page_table.

    Attributes:
        page_table: i32[max_num_seqs, pages_per_seq], a row per request, 0 past
            its pages.
        lengths: i32[max_num_seqs], tokens of each row before the step.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_seqs: int,
        pages_per_seq: int,
        page_size: int,
    ) -> None:
        self.page_table = np.zeros((max_num_seqs, pages_per_seq), np.int32)
        self.lengths = np.zeros(max_num_seqs, np.int32)
        self._page_size = page_size
        self._tokens = np.arange(max_num_tokens, dtype=np.int32)
        self._row_starts = np.arange(max_num_seqs) * pages_per_seq
        self._step = Step(
            kv_lens=np.zeros(max_num_seqs, np.int32),
            page_indices=np.zeros_like(self.page_table),
            cu_q_lens=np.zeros(max_num_seqs + 1, np.int32),
            num_seqs=np.zeros(1, np.int32),
            distribution=np.zeros(3, np.int32),
            slot_mapping=np.full(max_num_tokens, -1, np.int32),
            order=np.empty(0, np.int64),
        )

    def plan(self, rows: Array, counts: Array) -> Step:
        """Appends counts[i] >= 1 tokens to rows[i] and writes the step.

        Args:
            rows: integers[num_seqs], which rows of page_table.
            counts: i32[num_seqs], how many tokens each brings.
        """
        step, num_seqs = self._step, len(rows)
        decodes = counts == 1
        num_decodes = int(np.count_nonzero(decodes))
        if num_decodes == num_seqs:
            order = np.arange(num_seqs)
        else:
            order = np.argsort(~decodes, kind="stable")
            rows, counts = rows[order], counts[order]

        before = self.lengths[rows]
        after = np.add(before, counts, out=step.kv_lens[:num_seqs])
        self.lengths[rows] = after
        step.kv_lens[num_seqs:] = 0
        counts.cumsum(out=step.cu_q_lens[1 : num_seqs + 1])
        total = int(step.cu_q_lens[num_seqs])
        step.cu_q_lens[num_seqs + 1 :] = total
        table = step.page_indices
        # Any mode but raise writes to out without a buffer between.
        self.page_table.take(rows, axis=0, out=table[:num_seqs], mode="clip")
        table[num_seqs:] = 0
        self._map_slots(before, counts, total)
        step.num_seqs[0] = num_seqs
        step.distribution[:] = num_decodes, num_decodes, num_seqs
        return dataclasses.replace(step, order=order)

    def _map_slots(self, before: Array, counts: Array, total: int) -> None:
        """Writes slot_mapping from the table and the lengths before."""
        row_starts = self._row_starts[: len(before)]
        positions = before
        if total > len(before):
            shift = before - self._step.cu_q_lens[: len(before)]
            positions = self._tokens[:total] + shift.repeat(counts)
            row_starts = row_starts.repeat(counts)
        pages = positions // self._page_size  # divmod is slower.
        offsets = positions - pages * self._page_size
        ids = self._step.page_indices.reshape(-1).take(row_starts + pages)
        slots = self._step.slot_mapping
        np.add(ids * self._page_size, offsets, out=slots[:total])
        slots[total:] = -1
