"""PagePool: who holds which page of the KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagemill import _core
from pagemill.errors import PagemillError


class Sequence:
    """A request's place in a pool; made by :meth:`PagePool.open`.

    Attributes:
      pool: the pool it belongs to.
      handle: its id in the pool; never used again once it is closed.
      num_prompt_tokens: tokens it was opened with.
      num_cached_tokens: of those, how many are in its pages already.
    """

    __slots__ = ("handle", "num_cached_tokens", "num_prompt_tokens", "pool")

    def __init__(
        self,
        pool: PagePool,
        handle: int,
        num_prompt_tokens: int,
        num_cached_tokens: int = 0,
    ) -> None:
        self.pool = pool
        self.handle = handle
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens

    @property
    def length(self) -> int:
        """Tokens whose KV has a place: those planned so far."""
        return self.pool._core.length(self.handle)

    @property
    def pages(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[ceil(length / page_size)]: its page ids in order, a copy."""
        return self.pool._core.pages(self.handle)

    def __repr__(self) -> str:
        """Tells a closed sequence from a live one."""
        try:
            state = f"length={self.length}"
        except PagemillError:
            state = "closed"
        slot, generation = self.handle & 0xFFFFFFFF, self.handle >> 32
        return f"Sequence({slot}, generation={generation}, {state})"


class PagePool:
    """Reference-counted pages of one KV cache.

    A failed call changes nothing. Safe to use from several threads.

    Args:
      total_num_pages: pages in the cache.
      page_size: tokens per page.
    """

    def __init__(self, total_num_pages: int, page_size: int) -> None:
        self._core = _core.PagePool(
            as_count("total_num_pages", total_num_pages),
            as_count("page_size", page_size),
        )

    def open(self, tokens: Any = ()) -> Sequence:
        """A new sequence with no pages yet; :meth:`Planner.plan` gives them.

        Args:
          tokens: the prompt's token ids, a one-dimensional array of integers.
            Prefixes are not looked up yet: ``num_cached_tokens`` is 0.

        Raises:
          PagemillError: tokens that are not token ids.
        """
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise PagemillError(
                f"tokens has shape {array.shape} and dtype {array.dtype}; it "
                "must be a one-dimensional array of integers. Pass the "
                "prompt's token ids."
            )
        return Sequence(self, self._core.open(), int(array.size))

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence over the same tokens.

        Full pages are shared. A partly filled last page is not: the fork gets
        a page of its own, and :meth:`take_page_copies` then holds the copy to
        make.

        Raises:
          CapacityError: no page is left for the partly filled last one.
          PagemillError: a closed or foreign sequence.
        """
        handle = self._core.fork(self._own(seq))
        return Sequence(
            self, handle, seq.num_prompt_tokens, seq.num_cached_tokens
        )

    def truncate(self, seq: Sequence, length: int) -> None:
        """Forgets the tokens at and past ``length``; frees their pages.

        Where the new last page is shared and partly filled, the sequence gets
        a page of its own, as in :meth:`fork`.

        Raises:
          PagemillError: a length outside [0, seq.length], or a closed or
            foreign sequence.
          CapacityError: no page is left for the copy.
        """
        self._core.truncate(self._own(seq), as_count("length", length))

    def close(self, seq: Sequence) -> None:
        """Gives the sequence's pages back; it cannot be used afterwards.

        Raises:
          PagemillError: it was closed before, or belongs to another pool.
        """
        self._core.close(self._own(seq))

    def take_page_copies(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[n, 2]: (source, target) pages to copy before the next plan.

        Apply them with :func:`pagemill.copy_pages`. A plan that would write
        behind an untaken copy is refused.
        """
        return self._core.take_page_copies()

    def reference_count(self, page: int) -> int:
        """How many sequences hold a page.

        Raises:
          PagemillError: a page outside [0, total_num_pages).
        """
        return self._core.reference_count(as_count("page", page))

    @property
    def total_num_pages(self) -> int:
        """Pages in the cache."""
        return self._core.total_num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._core.page_size

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds."""
        return self._core.num_free_pages

    @property
    def num_sequences(self) -> int:
        """Sequences opened and not yet closed."""
        return self._core.num_sequences

    def audit(self) -> None:
        """Counts everything anew, in O(total_num_pages).

        Raises:
          RuntimeError: an invariant of the pool is broken: a bug in Pagemill.
        """
        self._core.audit()

    def __repr__(self) -> str:
        """Says how full the pool is."""
        return (
            f"PagePool(total_num_pages={self.total_num_pages}, "
            f"page_size={self.page_size}, "
            f"num_free_pages={self.num_free_pages}, "
            f"num_sequences={self.num_sequences})"
        )

    def _own(self, seq: Sequence) -> int:
        if not isinstance(seq, Sequence):
            raise PagemillError(
                f"seq is a {type(seq).__name__}, not a Sequence. "
                "Pass what PagePool.open returned."
            )
        if seq.pool is not self:
            raise PagemillError(
                f"{seq!r} belongs to another pool, {seq.pool!r}. "
                "Use the pool that opened it."
            )
        return seq.handle


def as_count(name: str, value: Any) -> int:
    """An int of anything with ``__index__`` but bool; int64 at most.

    Raises:
      PagemillError: another type or an integer beyond int64.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise PagemillError(
            f"{name}={value!r} must be an integer. Pass an int."
        )
    count = value.__index__()
    if not -(2**63) <= count < 2**63:
        raise PagemillError(f"{name}={count} does not fit int64.")
    return int(count)
