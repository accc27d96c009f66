"""Planner: writes the metadata of a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from pagemill import _core
from pagemill.batch import RaggedBatch
from pagemill.errors import PagemillError
from pagemill.pool import PagePool, Sequence, as_count


class Planner:
    """Turns a scheduler's decision into a :class:`RaggedBatch`.

    Every batch has the same shapes, so that a stream of batches compiles one
    program. Each plan gets arrays of its own: they may be read for as long as
    the batch lives, whatever is planned meanwhile.

    Args:
      pool: where pages come from.
      max_num_tokens: rows of the token buffer.
      max_num_seqs: sequences in a step, at most.
      pages_per_seq: pages of one sequence, at most.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_tokens: int,
        max_num_seqs: int,
        pages_per_seq: int,
    ) -> None:
        if not isinstance(pool, PagePool):
            raise PagemillError(
                f"pool is a {type(pool).__name__}, not a PagePool. "
                "Make one: pagemill.PagePool(total_num_pages, page_size)."
            )
        self.pool = pool
        self.max_num_tokens = as_count("max_num_tokens", max_num_tokens)
        self.max_num_seqs = as_count("max_num_seqs", max_num_seqs)
        self.pages_per_seq = as_count("pages_per_seq", pages_per_seq)
        self._order = np.empty(0, np.int32)
        self._core = _core.Planner(
            pool._core,
            self.max_num_tokens,
            self.max_num_seqs,
            self.pages_per_seq,
        )

    def plan(self, requests: Iterable[tuple[Sequence, int]]) -> RaggedBatch:
        """Appends tokens to sequences and writes the step's metadata.

        Rows with one token come first, otherwise the order given is kept;
        :attr:`order` tells which row is whose. Pages are reserved, and each
        sequence's ``length`` grows by its tokens: to take them back, as after
        rejected speculative tokens, use :meth:`PagePool.truncate`.

        Args:
          requests: pairs of a sequence and how many new tokens it brings.

        Returns:
          The batch. Row r's tokens are rows ``cu_q_lens[r]`` to
          ``cu_q_lens[r + 1]`` of the token buffer.

        Raises:
          CapacityError: too few free pages; nothing was changed.
          PagemillError: a closed, foreign or repeated sequence, a token count
            below 1, or more than the planner's sizes; nothing was changed.
        """
        if not isinstance(requests, Iterable):
            raise PagemillError(
                f"requests is a {type(requests).__name__}; it must be a list "
                "of pairs (sequence, number of new tokens)."
            )
        pairs = [self._pair(i, pair) for i, pair in enumerate(requests)]
        plan = self._core.plan(
            np.array([handle for handle, _ in pairs], np.int64),
            np.array([count for _, count in pairs], np.int64),
        )
        self._order = plan.order
        return RaggedBatch.from_planned(
            plan,
            (
                self.pool.page_size,
                self.pool.total_num_pages,
                self.max_num_tokens,
            ),
        )

    @property
    def order(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[num_seqs]: row r of the last plan is request ``order[r]``."""
        return self._order

    def _pair(self, index: int, pair: Any) -> tuple[int, int]:
        try:
            seq, count = pair
        except (TypeError, ValueError):
            raise PagemillError(
                f"requests[{index}]={pair!r} must be a pair "
                "(sequence, number of new tokens)."
            ) from None
        return self.pool._own(seq), as_count(
            f"number of new tokens in requests[{index}]", count
        )
