"""work_list(): which keys each tile of queries needs, as a kernel runs them."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import numpy as np

from pagemill.batch import RaggedBatch
from pagemill.errors import PagemillError
from pagemill.layouts import proved
from pagemill.pool import Int32Array, as_count


class WorkFlag(enum.IntFlag):
    """Where an item stands among those of its tile of queries."""

    FIRST = 1
    """Begin the tile's output."""

    LAST = 2
    """Finish it."""


class WorkList(NamedTuple):
    """Items for a kernel; a pytree.

    Attributes:
      items: i32[capacity, 6]: row, q_begin, q_end, kv_begin, kv_end, flags.
        Queries are rows of the token buffer, keys are positions in the
        sequence, flags are of :class:`WorkFlag`. Padding has row -1 and zeros.
      num_items: i32[1], those that are no padding.
    """

    items: Any
    num_items: Any


def work_list(
    batch: RaggedBatch,
    *,
    q_block: int,
    kv_block: int,
    causal: bool = True,
    sliding_window: int | None = None,
    max_kv_per_item: int | None = None,
    capacity: int | None = None,
) -> WorkList:
    """Cuts a batch's attention into items.

    Each row's queries are cut into tiles of q_block. The keys that some query
    of a tile sees become its item, from the start of a block of kv_block to the
    last key seen; or several, in order, where max_kv_per_item says so. So no
    block is named that nobody sees, and no key past kv_len. Items stand in the
    order of the rows. O(items), in C++.

    Args:
      batch: the batch, on the host.
      q_block: queries of a tile, at most.
      kv_block: keys that a kernel takes at a time; a multiple of page_size.
      causal: a query sees keys at positions up to its own.
      sliding_window: number of keys a query keeps, itself included; None keeps
        all.
      max_kv_per_item: keys of an item, at most; a multiple of kv_block. None
        for no limit.
      capacity: rows of the list, for a shape that stays the same; as many as
        there are items when None.

    Raises:
      PagemillError: more items than the capacity; blocks that are no multiples;
        not a batch, or one that breaks its structure's rules.
    """
    if capacity is not None:
        capacity = as_count("capacity", capacity)
        if not 0 <= capacity < 2**31:
            raise PagemillError(
                f"capacity={capacity} must be in range [0, 2147483647]."
            )
    items, count = proved(batch).work_list(
        q_block=as_count("q_block", q_block),
        kv_block=as_count("kv_block", kv_block),
        causal=bool(causal),
        sliding_window=_limit("sliding_window", sliding_window),
        max_kv_per_item=_limit("max_kv_per_item", max_kv_per_item),
        capacity=capacity,
    )
    num_items: Int32Array = np.array([count], np.int32)
    return WorkList(items, num_items)


def _limit(name: str, value: int | None) -> int:
    """The core's 0 is None here."""
    if value is None:
        return 0
    value = as_count(name, value)
    if value < 1:
        raise PagemillError(
            f"{name}={value} must be at least 1. Pass None for no limit."
        )
    return value
