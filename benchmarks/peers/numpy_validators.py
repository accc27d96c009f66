"""Full validation in NumPy, as fast as we could make it."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]


class NumpyValidator:
    """Says whether a batch is sound: pagemill.validate's checks, no report.

    Of the optional arrays, slot_mapping and distribution, it knows nothing.
    What does not depend on a batch's values is allocated once.

    Args:
        max_num_seqs: rows of page_indices.
        pages_per_seq: its columns.
        page_size: tokens of a page.
        total_num_pages: pages in the cache.
        max_num_tokens: rows of the token buffer.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        pages_per_seq: int,
        page_size: int,
        total_num_pages: int,
        max_num_tokens: int,
    ) -> None:
        self._page_size = page_size
        self._total_num_pages = total_num_pages
        self._max_num_tokens = max_num_tokens
        self._capacity = pages_per_seq * page_size
        self._columns = np.arange(pages_per_seq, dtype=np.int32)
        self._row_starts = np.arange(max_num_seqs) * pages_per_seq
        # For each page, all 0 between calls: is it written in this step?
        self._written = np.zeros(total_num_pages, np.uint8)
        # For each page written, through which of the written slots.
        self._writer = np.empty(total_num_pages, np.int32)
        self._hits = np.empty(max_num_seqs * pages_per_seq, np.uint8)

    def __call__(
        self,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: int,
    ) -> bool:
        """Takes contiguous int32 arrays, as RaggedBatch holds them."""
        if num_seqs == 0:
            return True
        kv = kv_lens[:num_seqs]
        ends = cu_q_lens[1 : num_seqs + 1]
        starts = cu_q_lens[:num_seqs]
        if starts[0] != 0 or ends[-1] > self._max_num_tokens:
            return False
        if (ends < starts).any():
            return False
        q = ends - starts
        if (q > kv).any() or kv.max() > self._capacity:
            return False

        live = (kv - 1) // self._page_size + 1  # No overflow at int32's end.
        width = int(live.max())
        table = page_indices[:num_seqs, :width]
        # None: every slot of the table is live.
        mask = None
        if int(live.min()) != width:
            mask = self._columns[:width] < live[:, None]
        if not self._in_range(table, mask):
            return False
        slots = self._written_slots(kv, q, live)
        pages = page_indices.reshape(-1)[slots]
        return self._owned(pages, table, mask)

    def _in_range(self, table: Array, mask: Mask | None) -> bool:
        # As unsigned numbers, negative ids are too large as well. Most dead
        # slots hold ids too: then no mask is needed.
        ids: Array = table.view(np.uint32)
        if ids.max(initial=0) < self._total_num_pages:
            return True
        if mask is None:
            return False
        return bool(ids.max(initial=0, where=mask) < self._total_num_pages)

    def _written_slots(self, kv: Array, q: Array, live: Array) -> Array:
        """Indices into the flat table of slots that get this step's tokens."""
        rows = self._row_starts[: len(kv)]
        longest, shortest = int(q.max()), int(q.min())
        if longest == 1 == shortest:
            return rows + (live - 1)
        first = (kv - q) // self._page_size
        counts = live - first
        if shortest == 0:
            counts[q == 0] = 0
        ends = counts.cumsum()
        offsets = np.arange(ends[-1])
        return offsets + (rows + first - ends + counts).repeat(counts)

    def _owned(self, pages: Array, table: Array, mask: Mask | None) -> bool:
        """Is each written page named once: by the slot that writes it?"""
        order = np.arange(len(pages), dtype=np.int32)
        self._writer[pages] = order
        if (self._writer[pages] != order).any():
            return False
        self._written[pages] = 1
        hits = self._hits[: table.size].reshape(table.shape)
        # Clipped, because dead slots may hold anything.
        self._written.take(table, out=hits, mode="clip")
        if mask is not None:
            hits &= mask
        self._written[pages] = 0
        return int(np.count_nonzero(hits)) == len(pages)
