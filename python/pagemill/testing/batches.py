"""Random ragged batches that punish every read of what is not live.

Page tables are shuffled. What a kernel must not look at is poisoned: slots
past a sequence's last page are ids out of range, pages of nobody and the tail
of each last page are NaN, rows of q behind the last token are NaN, and rows of
the metadata behind num_seqs hold nonsense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

# What dead metadata holds, in turn.
_IDS_OUT_OF_RANGE = (2**31 - 1, -1, 1_000_000, -(2**31))
_DEAD_LENGTHS = (-5, 9999, 2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The operands of ragged paged attention, as NumPy arrays.

    Attributes:
      q: [max_num_tokens, num_q_heads, head_dim].
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim].
      kv_lens: i32[max_num_seqs].
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1].
    """

    q: Array
    kv_pages: Array
    kv_lens: Array
    page_indices: Array
    cu_q_lens: Array
    num_seqs: Array

    @property
    def operands(self) -> tuple[Array, ...]:
        """The arrays, in the order of the op."""
        return tuple(
            getattr(self, field.name) for field in dataclasses.fields(self)
        )

    @property
    def num_tokens(self) -> int:
        """Live query tokens."""
        return int(self.cu_q_lens[self.num_seqs[0]])

    def rows(self, seq: int) -> slice:
        """The query rows of a sequence."""
        return slice(int(self.cu_q_lens[seq]), int(self.cu_q_lens[seq + 1]))

    def pages(self, seq: int) -> Array:
        """i32[n]: the live pages of a sequence."""
        page_size = self.kv_pages.shape[1]
        used = -(-int(self.kv_lens[seq]) // page_size)
        return self.page_indices[seq, :used]

    def replace(self, **changes: Any) -> Batch:
        """A batch with other arrays."""
        return dataclasses.replace(self, **changes)


def random_batch(
    seqs: Sequence[tuple[int, int]],
    *,
    num_q_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 128,
    page_size: int = 16,
    dtype: Any = np.float32,
    kv_dtype: Any = None,
    max_num_tokens: int | None = None,
    max_num_seqs: int | None = None,
    pages_per_seq: int | None = None,
    num_dead_pages: int = 3,
    seed: int = 0,
) -> Batch:
    """Draws q, K and V of unit variance and lays them out, poisoned.

    Args:
      seqs: (q_len, kv_len) of each sequence; kv_len counts the q_len tokens.
      num_q_heads: query heads.
      num_kv_heads: heads of K, and of V.
      head_dim: size of a head.
      page_size: tokens of a page.
      dtype: of q and kv_pages; any that NumPy knows, ml_dtypes' included.
      kv_dtype: of kv_pages where it is another one.
      max_num_tokens: rows of q; None adds seven dead ones.
      max_num_seqs: rows of the metadata; None adds two dead ones.
      pages_per_seq: slots of a page-table row; None adds one to the longest.
      num_dead_pages: pages that belong to nobody.
      seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    q_lens = np.array([q_len for q_len, _ in seqs], np.int64)
    used = [-(-kv_len // page_size) for _, kv_len in seqs]
    total = int(q_lens.sum())
    tokens = total + 7 if max_num_tokens is None else max_num_tokens
    rows = len(seqs) + 2 if max_num_seqs is None else max_num_seqs
    slots = max([1, *used]) + 1 if pages_per_seq is None else pages_per_seq

    page_indices = np.resize(_IDS_OUT_OF_RANGE, (rows, slots)).astype(np.int32)
    num_pages = sum(used) + num_dead_pages
    free = rng.permutation(num_pages).astype(np.int32)
    kv_shape = (num_pages, page_size, 2 * num_kv_heads, head_dim)
    kv_dtype = np.dtype(dtype if kv_dtype is None else kv_dtype)
    # Integers have no NaN, but a value that would show.
    integer = kv_dtype.kind == "i"
    poison, spread = (np.iinfo(kv_dtype).max, 20) if integer else (np.nan, 1)
    kv_pages = np.full(kv_shape, poison, kv_dtype)
    kv_lens = np.resize(_DEAD_LENGTHS, rows).astype(np.int32)
    cu_q_lens = np.full(rows + 1, total, np.int32)
    cu_q_lens[: len(seqs) + 1] = np.concatenate([[0], np.cumsum(q_lens)])
    for seq, (_, kv_len) in enumerate(seqs):
        pages, free = free[: used[seq]], free[used[seq] :]
        page_indices[seq, : used[seq]] = pages
        kv_lens[seq] = kv_len
        kv = np.full((used[seq] * page_size, *kv_shape[2:]), poison, kv_dtype)
        kv[:kv_len] = spread * rng.standard_normal((kv_len, *kv_shape[2:]))
        kv_pages[pages] = kv.reshape(-1, *kv_shape[1:])
    q = np.full((tokens, num_q_heads, head_dim), np.nan, dtype)
    q[:total] = rng.standard_normal((total, *q.shape[1:]))
    return Batch(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        np.array([len(seqs)], np.int32),
    )
