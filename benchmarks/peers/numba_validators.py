"""Full validation in numba, as fast as we could make it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _jit(function: _Function) -> _Function:
    """Compiles a function on its first call."""
    compiled: Any = numba.njit(error_model="numpy", nogil=True)(function)
    return cast("_Function", compiled)


class NumbaValidator:
    """Says whether a batch is sound: what NumpyValidator does, in one call.

    Made for the same sizes; compiled, which takes seconds, with the first one.

    Args:
        page_size: tokens of a page.
        total_num_pages: pages in the cache.
        max_num_tokens: rows of the token buffer.
    """

    def __init__(
        self, *, page_size: int, total_num_pages: int, max_num_tokens: int
    ) -> None:
        self._sizes = (page_size, total_num_pages, max_num_tokens)
        # For each page, all 0 between calls: is it written in this step?
        self._written = np.zeros(total_num_pages, np.uint8)
        zeros = np.zeros((1, 1), np.int32)
        self(zeros[0], zeros, zeros[0], 0)

    def __call__(
        self,
        kv_lens: Array,
        page_indices: Array,
        cu_q_lens: Array,
        num_seqs: int,
    ) -> bool:
        """Takes contiguous int32 arrays, as RaggedBatch holds them."""
        return _accepts(
            kv_lens,
            page_indices,
            cu_q_lens,
            num_seqs,
            self._sizes,
            self._written,
        )


@_jit
def _accepts(
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: int,
    sizes: tuple[int, int, int],
    written: Array,
) -> bool:
    page_size, total_num_pages, max_num_tokens = sizes
    if num_seqs == 0:
        return True
    if cu_q_lens[0] != 0 or cu_q_lens[num_seqs] > max_num_tokens:
        return False
    capacity = page_indices.shape[1] * page_size
    if not _lengths_hold(kv_lens, cu_q_lens, num_seqs, capacity):
        return False
    live = (kv_lens[:num_seqs] + np.int64(page_size - 1)) // page_size
    if not _in_range(page_indices, live, np.uint32(total_num_pages)):
        return False
    first = _first_written(kv_lens, cu_q_lens, live, page_size)
    pages = _mark(page_indices, first, live, written)
    named = _count_marked(page_indices, live, written)
    _clear(page_indices, first, live, written)
    return pages == named


@_jit
def _lengths_hold(
    kv_lens: Array, cu_q_lens: Array, num_seqs: int, capacity: int
) -> bool:
    bad = False
    for s in range(num_seqs):
        q = cu_q_lens[s + 1] - cu_q_lens[s]
        kv = kv_lens[s]
        bad |= (q < 0) | (q > kv) | (kv > capacity)
    return not bad


@_jit
def _in_range(table: Array, live: Array, total_num_pages: np.uint32) -> bool:
    largest = np.uint32(0)
    for s in range(len(live)):
        for page in table[s, : live[s]]:
            # As an unsigned number, a negative id is too large as well.
            largest = max(largest, np.uint32(page))
    return bool(largest < total_num_pages)


@_jit
def _first_written(
    kv_lens: Array, cu_q_lens: Array, live: Array, page_size: int
) -> Array:
    first = np.empty_like(live)
    for s in range(len(live)):
        q = cu_q_lens[s + 1] - cu_q_lens[s]
        first[s] = (kv_lens[s] - q) // page_size if q > 0 else live[s]
    return first


@_jit
def _mark(table: Array, first: Array, live: Array, written: Array) -> int:
    """Marks written pages; returns how many there are."""
    pages = 0
    for s in range(len(live)):
        for page in table[s, first[s] : live[s]]:
            index = np.uint32(page)
            pages += 1 - written[index]
            written[index] = 1
    return pages


@_jit
def _count_marked(table: Array, live: Array, written: Array) -> int:
    """In how many live slots a written page is named."""
    named = 0
    for s in range(len(live)):
        row = np.uint32(0)
        for page in table[s, : live[s]]:
            row += np.uint32(written[np.uint32(page)])
        named += int(row)
    return named


@_jit
def _clear(table: Array, first: Array, live: Array, written: Array) -> None:
    for s in range(len(live)):
        for page in table[s, first[s] : live[s]]:
            written[np.uint32(page)] = 0
