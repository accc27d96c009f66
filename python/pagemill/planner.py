"""Planner: writes the metadata of a step."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from pagemill import _core
from pagemill.batch import RaggedBatch, as_int32
from pagemill.errors import PagemillError
from pagemill.pool import Int32Array, PagePool, as_count
from pagemill.step import Fences, Step, Views


class Planner:
    """Turns a scheduler's decision into a :class:`RaggedBatch`.

    Shapes come from the buckets only, so that a stream of batches compiles a
    bounded number of programs.

    :meth:`plan` is the simple way: each batch has arrays of its own, and the
    step counts as done once the next one is planned. :meth:`step` is the fast
    one: the batch lies in a ring of buffers that are rewritten, each step only
    where something changed, after the computation that reads them is over.

    For one thread at a time; several planners may share a pool.

    Args:
      pool: where pages come from.
      max_num_tokens: rows of the token buffer.
      max_num_seqs: sequences in a step, at most.
      pages_per_seq: pages of one sequence, at most.
      ring: buffers: steps that may be open or in flight at once.
      token_buckets: capacities for tokens to choose from, ascending and ending
        with max_num_tokens; only that one when None.
      seq_buckets: likewise for sequences, ending with max_num_seqs.
      prefill_chunk: rows of just so many tokens form the batch's prefill range.
      keep_rows: a sequence keeps its row from step to step where decodes can
        still come first, so that admitting and finishing others moves no page
        table rows. False keeps the order of the requests instead.
      track_delta: whether steps tell what changed in the page table
        (:attr:`Step.table_delta`).

    Raises:
      PagemillError: sizes out of range or buckets that do not fit.
    """

    def __init__(
        self,
        pool: PagePool,
        max_num_tokens: int,
        max_num_seqs: int,
        pages_per_seq: int,
        *,
        ring: int = 3,
        token_buckets: Iterable[int] | None = None,
        seq_buckets: Iterable[int] | None = None,
        prefill_chunk: int | None = None,
        keep_rows: bool = False,
        track_delta: bool = False,
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
        self.ring = as_count("ring", ring)
        self.track_delta = bool(track_delta)
        self.token_buckets = _buckets(
            "token_buckets", token_buckets, self.max_num_tokens
        )
        self.seq_buckets = _buckets(
            "seq_buckets", seq_buckets, self.max_num_seqs
        )
        self._core = _core.Planner(
            pool._core,
            self.max_num_tokens,
            self.max_num_seqs,
            self.pages_per_seq,
            self.ring,
            list(self.token_buckets),
            list(self.seq_buckets),
            0
            if prefill_chunk is None
            else as_count("prefill_chunk", prefill_chunk),
            bool(keep_rows),
            self.track_delta,
        )
        self._views: dict[int, Views] = {}
        self._fences = Fences(self._core)
        self._planned: Step | None = None
        self._newest: Step | None = None
        self._order = np.empty(0, np.int32)

    def plan(self, requests: Any, counts: Any = None) -> Any:
        """Appends tokens to sequences and writes the step's metadata.

        Decodes (rows with one token) come first, then chunks of prefill_chunk
        tokens, then the rest, each in the order given (but see keep_rows);
        :attr:`order` tells which row is whose. Pages are reserved, and each
        sequence's ``length`` grows by its tokens. The step before is committed,
        if it was not yet: its full pages can then be found by others. To take
        tokens back, as after rejected speculative ones, use
        :meth:`PagePool.truncate`, or :meth:`commit` with what was accepted, or
        :meth:`abort`.

        Devices must run the steps in the order planned, as a stream does: a
        page given back may be handed out to the next step.

        Args:
          requests: pairs of a sequence and how many new tokens it brings; or
            the sequences' handles as an i64 array, with ``counts``.
          counts: the new tokens of each handle, i32.

        Returns:
          The batch, with arrays of its own. Row r's tokens are rows
          ``cu_q_lens[r]`` to ``cu_q_lens[r + 1]`` of the token buffer. For a
          pool of several KV groups: a tuple of batches, one a group.

        Raises:
          CapacityError: too few free pages; nothing was changed (but for the
            step before, which is committed).
          PagemillError: a closed, foreign or repeated sequence, a token count
            below 1, or more than the planner's sizes; likewise.
          LeaseError: every buffer is leased by steps of :meth:`step`.
        """
        arrays = self._read(requests, counts)
        self._close_planned()
        self._fences.poll()
        step = Step(self, self._core.step(*arrays))
        self._planned = step
        self._order = step.order
        views = self._make_views(
            self._core.copy(step.buffer, *step.capacities), *step.capacities
        )
        # Its arrays were copied: nothing reads the buffer any more.
        self._core.retire(step.buffer)
        batches = views.batches
        return batches[0] if len(batches) == 1 else batches

    def step(self, requests: Any, counts: Any = None) -> Step:
        """The same as a lease on a buffer, which costs what changed only.

        A step of :meth:`plan` that is still open is committed, as there.

        JAX may read the leased arrays in place, also after a call returned: on
        CPUs it aliases them. So give an output of the computation to
        :meth:`Step.retire`, and commit or abort the step.

        Args:
          requests: as of :meth:`plan`.
          counts: likewise.

        Raises:
          CapacityError: too few free pages; nothing was changed.
          PagemillError: as of :meth:`plan`; nothing was changed.
          LeaseError: every buffer is leased; nothing was changed.
        """
        if self._planned is not None:
            self._close_planned()
        if self._fences.pending:
            self._fences.poll()
        if counts is not None:
            try:  # arrays as the core takes them
                return Step(self, self._core.step(requests, counts))
            except TypeError:
                pass
        return Step(self, self._core.step(*self._read(requests, counts)))

    def commit(self, accepted: Any = None) -> None:
        """Commits the step that :meth:`plan` planned last.

        Args:
          accepted: i32[num_seqs]: of each row's tokens, how many to keep.

        Raises:
          PagemillError: no such step, or as of :meth:`Step.commit`.
        """
        self._require_planned().commit(accepted)
        self._planned = None

    def abort(self) -> None:
        """Takes back the step that :meth:`plan` planned last.

        Raises:
          PagemillError: no such step, or as of :meth:`Step.abort`.
        """
        self._require_planned().abort()
        self._planned = None

    def poll(self) -> None:
        """Takes back the buffers and pages of steps whose fences are ready."""
        self._fences.poll()

    @property
    def order(self) -> Int32Array:
        """i32[num_seqs]: row r of the last plan is request ``order[r]``."""
        return self._order

    def _require_planned(self) -> Step:
        if self._planned is None:
            raise PagemillError(
                "no planned step is open. It was committed or aborted, or the "
                "plan after it has committed it."
            )
        return self._planned

    def _close_planned(self) -> None:
        if self._planned is not None:
            self._planned.commit()
            self._planned = None

    def _views_of(self, code: int) -> Views:
        views = self._views.get(code)
        if views is None:
            buffer, seqs, tokens = self._decode(code)
            memory = self._core.memory(buffer)
            views = self._make_views(
                memory, seqs, tokens, self.max_num_seqs, self.max_num_tokens
            )
            self._views[code] = views
        return views

    def _decode(self, code: int) -> tuple[int, int, int]:
        """The buffer, max_num_seqs and max_num_tokens of a step's code."""
        bucket, buffer = divmod(code, self.ring)
        tokens, seqs = divmod(bucket, len(self.seq_buckets))
        return buffer, self.seq_buckets[seqs], self.token_buckets[tokens]

    def _make_views(
        self,
        memory: Any,
        seqs: int,
        tokens: int,
        laid_seqs: int | None = None,
        laid_tokens: int | None = None,
    ) -> Views:
        """Arrays of a bucket in memory laid out for capacities no smaller."""
        laid_seqs = laid_seqs or seqs
        laid_tokens = laid_tokens or tokens
        at = dict(self._core.layout(laid_seqs, laid_tokens))
        width, groups = self.pages_per_seq, self.pool.num_groups
        slots = memory[at["slot_mapping"] :][: groups * laid_tokens]
        table = memory[at["page_indices"] :][: groups * laid_seqs * width]
        common = {
            name: memory[at[name] :][:size]
            for name, size in (
                ("num_seqs", 1),
                ("distribution", 3),
                ("kv_lens", seqs),
                ("cu_q_lens", seqs + 1),
            )
        }
        statics = (self.pool.page_size, self.pool.total_num_pages, tokens)
        batches = tuple(
            RaggedBatch.from_planned(
                types.SimpleNamespace(
                    **common,
                    slot_mapping=slots[group * laid_tokens :][:tokens],
                    page_indices=table[group * laid_seqs * width :][
                        : seqs * width
                    ].reshape(seqs, width),
                ),
                statics,
            )
            for group in range(groups)
        )
        return Views(
            batches=batches,
            positions=memory[at["positions"] :][:tokens],
            logits_indices=memory[at["logits_indices"] :][:seqs],
            small=memory[: at["page_indices"]],
            memory=memory,
            offsets=at,
        )

    def _read(self, requests: Any, counts: Any) -> tuple[Any, Any]:
        """Handles and counts as the core takes them."""
        if counts is not None:
            handles = np.ascontiguousarray(requests)
            if handles.dtype != np.int64 or handles.ndim != 1:
                raise PagemillError(
                    f"requests has shape {handles.shape} and dtype "
                    f"{handles.dtype}; with counts it must be a "
                    "one-dimensional int64 array of sequence handles."
                )
            counts = np.asarray(as_int32("counts", counts))
            if counts.ndim != 1:
                raise PagemillError(
                    f"counts has shape {counts.shape}; it must be "
                    "one-dimensional: the new tokens of each handle."
                )
            return handles, counts
        if not isinstance(requests, Iterable):
            raise PagemillError(
                f"requests is a {type(requests).__name__}; it must be a list "
                "of pairs (sequence, number of new tokens)."
            )
        pairs = [self._pair(i, pair) for i, pair in enumerate(requests)]
        return (
            np.array([handle for handle, _ in pairs], np.int64),
            np.array([count for _, count in pairs], np.int32),
        )

    def _pair(self, index: int, pair: Any) -> tuple[int, int]:
        try:
            seq, count = pair
        except (TypeError, ValueError):
            raise PagemillError(
                f"requests[{index}]={pair!r} must be a pair "
                "(sequence, number of new tokens)."
            ) from None
        count = as_count(f"number of new tokens in requests[{index}]", count)
        if not -(2**31) <= count < 2**31:
            raise PagemillError(
                f"requests[{index}] brings {count} tokens, which does not fit "
                "int32. Split the prompt into chunks."
            )
        return self.pool._own(seq), count

    def __repr__(self) -> str:
        """Says what it is for."""
        return (
            f"Planner({self.pool!r}, max_num_tokens={self.max_num_tokens}, "
            f"max_num_seqs={self.max_num_seqs}, "
            f"pages_per_seq={self.pages_per_seq}, ring={self.ring})"
        )


def _buckets(
    name: str, buckets: Iterable[int] | None, size: int
) -> tuple[int, ...]:
    if buckets is None:
        return (size,)
    if not isinstance(buckets, Iterable):
        raise PagemillError(
            f"{name} is a {type(buckets).__name__}; it must be ascending "
            "capacities."
        )
    return tuple(as_count(f"{name}[{i}]", b) for i, b in enumerate(buckets))
