"""One step of several data-parallel ranks.

Each rank has a pool, a planner and a KV cache of its own. The arrays of their
batches, each as for one rank and of the same shapes, stand one after the other
in a :class:`ShardedBatch`, so that sharding every array along its first axis
gives each rank its own::

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def attend(q, kv_pages, sharded):
        return pagemill.ragged_paged_attention(q, kv_pages, sharded.local())

A ShardedBatch is no RaggedBatch: as one, it would be rows of several batches
that point into different caches, and no op could tell. So the ops take only
what :meth:`ShardedBatch.local` or :meth:`ShardedBatch.section` returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pagemill.batch import (
    ARRAYS,
    STATICS,
    BatchTree,
    RaggedBatch,
    as_int32,
)
from pagemill.errors import CapacityError, LeaseError, PagemillError
from pagemill.planner import Planner
from pagemill.pool import Int32Array, as_count
from pagemill.step import Step


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ShardedBatch(BatchTree):
    """Batches of R ranks, one after the other in each array.

    A pytree whose arrays are leaves. Page ids, slots and sums of query lengths
    are those within a rank: each section starts at 0.

    Attributes:
      kv_lens: i32[R * max_num_seqs].
      page_indices: i32[R * max_num_seqs, pages_per_seq].
      cu_q_lens: i32[R * (max_num_seqs + 1)].
      num_seqs: i32[R].
      distribution: i32[R * 3] or None.
      slot_mapping: i32[R * max_num_tokens] or None.
      page_size, total_num_pages, max_num_tokens: of one rank.
    """

    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    num_seqs: Any
    distribution: Any = None
    slot_mapping: Any = None
    page_size: int
    total_num_pages: int
    max_num_tokens: int

    @classmethod
    def concatenate(cls, sections: Iterable[RaggedBatch]) -> ShardedBatch:
        """The ranks' batches as one; the arrays are copied.

        Args:
          sections: a batch for each rank, on the host, all of the same shapes
            and sizes.

        Raises:
          PagemillError: no batches, or they differ.
        """
        sections = list(sections)
        for rank, section in enumerate(sections):
            if not isinstance(section, RaggedBatch):
                raise PagemillError(
                    f"sections[{rank}] is a {type(section).__name__}, not a "
                    "RaggedBatch."
                )
            _require_same(rank, _shapes(sections[0]), _shapes(section))
        if not sections:
            raise PagemillError("sections is empty. Pass a batch a rank.")
        return cls.tree_unflatten(
            tuple(getattr(sections[0], name) for name in STATICS),
            [
                None
                if getattr(sections[0], name) is None
                else np.concatenate([getattr(s, name) for s in sections])
                for name in ARRAYS
            ],
        )

    @property
    def num_ranks(self) -> int:
        """Sections: all of them, or 1 inside of shard_map."""
        return int(self.num_seqs.shape[0])

    def section(self, rank: int) -> RaggedBatch:
        """The batch of one rank: views where the arrays are numpy's.

        Raises:
          PagemillError: no such rank.
        """
        ranks = self.num_ranks
        rank = as_count("rank", rank)
        if not 0 <= rank < ranks:
            raise PagemillError(
                f"rank={rank} must be in range [0, num_ranks={ranks})."
            )

        def part(array: Any) -> Any:
            if array is None or ranks == 1:
                return array
            size = array.shape[0] // ranks
            return array[rank * size : (rank + 1) * size]

        return RaggedBatch(
            **{name: part(getattr(self, name)) for name in ARRAYS},
            **{name: getattr(self, name) for name in STATICS},
        )

    def local(self) -> RaggedBatch:
        """The batch of this rank, inside of shard_map.

        Raises:
          PagemillError: there are sections of several ranks.
        """
        if self.num_ranks != 1:
            raise PagemillError(
                f"local() found the sections of {self.num_ranks} ranks. Call "
                "it inside of jax.shard_map, over as many devices, with every "
                "array sharded along its first axis; or use section(rank)."
            )
        return self.section(0)


class ShardedPlanner:
    """Plans a step of every rank, or of none.

    All ranks take one bucket, the largest that any of them needs, so that they
    run one program. For one thread at a time; leave the planners alone while
    they are in here.

    Args:
      planners: one a rank, of equal sizes and buckets, each with a pool of its
        own; the pools have equal sizes, too.

    Raises:
      PagemillError: the planners differ, or share a pool.
    """

    def __init__(self, planners: Iterable[Planner]) -> None:
        self.planners: tuple[Planner, ...] = tuple(planners)
        if not self.planners:
            raise PagemillError("planners is empty. Pass one a rank.")
        for rank, planner in enumerate(self.planners):
            if not isinstance(planner, Planner):
                raise PagemillError(
                    f"planners[{rank}] is a {type(planner).__name__}, not a "
                    "Planner. Make one: pagemill.Planner(pool, ...)."
                )
            _require_same(rank, _sizes(self.planners[0]), _sizes(planner))
            if any(p.pool is planner.pool for p in self.planners[:rank]):
                raise PagemillError(
                    f"planners[{rank}] shares its pool with another rank. Each "
                    "rank has a KV cache of its own: give it its own PagePool."
                )
        self._steps: list[Step] = []
        self._positions = self._logits_indices = np.empty(0, np.int32)

    @property
    def num_ranks(self) -> int:
        """How many planners there are."""
        return len(self.planners)

    def plan(self, requests_per_rank: Any, counts_per_rank: Any = None) -> Any:
        """Appends tokens to sequences of every rank; as of Planner.plan.

        All ranks are checked before any is changed. The step before is
        committed, if it was not yet.

        Args:
          requests_per_rank: what :meth:`Planner.plan` takes, for each rank; []
            for a rank that has nothing to do.
          counts_per_rank: likewise.

        Returns:
          A :class:`ShardedBatch` with arrays of its own; for pools of several
          KV groups a tuple of them, one a group.

        Raises:
          CapacityError: a rank, ``.rank``, has too few free pages; nothing was
            changed on any (but for the step before, which is committed).
          PagemillError: as of :meth:`Planner.plan`; likewise.
          LeaseError: likewise.
        """
        arrays = self._read(requests_per_rank, counts_per_rank)
        for planner in self.planners:
            planner._close_planned()
        self._steps = []
        for rank, planner in enumerate(self.planners):
            with _naming(rank):
                planner._fences.poll()
                planner._core.check(*arrays[rank])
        steps = self._begin(arrays)
        batches = self._gather(steps)
        for planner, step in zip(self.planners, steps, strict=True):
            # Its arrays were copied: nothing reads the buffer any more.
            step.retire(done=True)
            planner._planned, planner._order = step, step.order
        self._steps = steps
        return batches[0] if len(batches) == 1 else batches

    def commit(self, accepted_per_rank: Sequence[Any] | None = None) -> None:
        """Commits the last plan on every rank.

        Args:
          accepted_per_rank: for each rank i32[num_seqs]: of each row's tokens,
            how many to keep; all where None.

        Raises:
          PagemillError: no such step, or counts out of range; nothing was
            committed.
        """
        self._require_planned()
        accepted = accepted_per_rank
        if accepted is None:
            accepted = [None] * self.num_ranks
        self._require_ranks("accepted_per_rank", accepted)
        checked = [
            None if kept is None else self._check_accepted(rank, kept)
            for rank, kept in enumerate(accepted)
        ]
        for rank, planner in enumerate(self.planners):
            with _naming(rank):
                planner.commit(checked[rank])
        self._steps = []

    def abort(self) -> None:
        """Takes back the last plan on every rank.

        Raises:
          PagemillError: no such step, or as of :meth:`Step.abort`.
        """
        self._require_planned()
        for rank, planner in enumerate(self.planners):
            with _naming(rank):
                planner.abort()
        self._steps = []

    @property
    def order(self) -> tuple[Int32Array, ...]:
        """For each rank i32[num_seqs], as of :attr:`Planner.order`."""
        return tuple(planner.order for planner in self.planners)

    @property
    def positions(self) -> Int32Array:
        """i32[R * max_num_tokens]: places of the last plan's tokens."""
        return self._positions

    @property
    def logits_indices(self) -> Int32Array:
        """i32[R * max_num_seqs]: rows' last tokens, counted within a rank."""
        return self._logits_indices

    def _begin(self, arrays: list[tuple[Any, Any]]) -> list[Step]:
        """A step of every rank, or of none.

        After the checks only another user of a pool can make one fail.
        """
        steps: list[Step] = []
        try:
            for rank, planner in enumerate(self.planners):
                with _naming(rank):
                    code = planner._core.step(*arrays[rank])
                    steps.append(Step(planner, code))
        except BaseException:
            for step in reversed(steps):
                step.abort()
                step.retire(done=True)
            raise
        return steps

    def _gather(self, steps: list[Step]) -> tuple[ShardedBatch, ...]:
        """Copies the steps' arrays, at the largest of their capacities."""
        seqs, tokens = map(
            max, zip(*(s.capacities for s in steps), strict=True)
        )
        first = self.planners[0]
        bucket = first.seq_buckets.index(seqs) + len(
            first.seq_buckets
        ) * first.token_buckets.index(tokens)
        views = [
            planner._views_of(step.buffer + planner.ring * bucket)
            for planner, step in zip(self.planners, steps, strict=True)
        ]
        self._positions = np.concatenate([v.positions for v in views])
        self._logits_indices = np.concatenate([v.logits_indices for v in views])
        groups = zip(*(v.batches for v in views), strict=True)
        return tuple(ShardedBatch.concatenate(group) for group in groups)

    def _read(self, requests: Any, counts: Any) -> list[tuple[Any, Any]]:
        self._require_ranks("requests_per_rank", requests)
        if counts is None:
            counts = [None] * self.num_ranks
        self._require_ranks("counts_per_rank", counts)
        arrays = []
        for rank, planner in enumerate(self.planners):
            with _naming(rank):
                arrays.append(planner._read(requests[rank], counts[rank]))
        return arrays

    def _require_ranks(self, name: str, values: Any) -> None:
        if not isinstance(values, Sequence) or len(values) != self.num_ranks:
            size = len(values) if hasattr(values, "__len__") else "no"
            raise PagemillError(
                f"{name} has {size} entries; it must be a list with one for "
                f"each of the {self.num_ranks} ranks. Pass [] for a rank that "
                "has nothing to do."
            )

    def _require_planned(self) -> None:
        if not self._steps:
            raise PagemillError(
                "no planned step is open. It was committed or aborted, or the "
                "plan after it has committed it."
            )

    def _check_accepted(self, rank: int, accepted: Any) -> Int32Array:
        views = self.planners[rank]._views_of(self._steps[rank]._code)
        batch = views.batches[0]
        counts = np.diff(batch.cu_q_lens[: int(batch.num_seqs[0]) + 1])
        kept = np.asarray(as_int32(f"accepted_per_rank[{rank}]", accepted))
        if kept.shape != counts.shape:
            raise PagemillError(
                f"accepted_per_rank[{rank}] has shape {kept.shape}; it must be "
                f"{counts.shape}, one entry for each row."
            )
        wrong = np.flatnonzero((kept < 0) | (kept > counts))
        if wrong.size:
            at = int(wrong[0])
            raise PagemillError(
                f"accepted_per_rank[{rank}][{at}]={kept[at]} must be in range "
                f"[0, {counts[at]}], the tokens that the row brought."
            )
        return kept

    def __repr__(self) -> str:
        """Says what it is for."""
        return f"ShardedPlanner({self.num_ranks} of {self.planners[0]!r})"


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Errors say which rank they are about."""
    try:
        yield
    except CapacityError as error:
        raise CapacityError(
            f"rank {rank}: {error}",
            need=error.need,
            free=error.free,
            evictable=error.evictable,
            fenced=error.fenced,
            rank=rank,
        ) from error
    except LeaseError as error:
        raise LeaseError(f"rank {rank}: {error}") from error
    except PagemillError as error:
        raise PagemillError(
            f"rank {rank}: {error}", error.violations
        ) from error


def _require_same(
    rank: int, first: dict[str, Any], this: dict[str, Any]
) -> None:
    for name, value in this.items():
        if value != first[name]:
            raise PagemillError(
                f"{name}={value} of rank {rank} must be that of rank 0, "
                f"{first[name]}: all ranks run one program. Make them equal."
            )


def _shapes(batch: RaggedBatch) -> dict[str, Any]:
    arrays = {name: getattr(batch, name) for name in ARRAYS}
    return {
        **{
            f"{n}.shape": None if a is None else a.shape
            for n, a in arrays.items()
        },
        **{name: getattr(batch, name) for name in STATICS},
    }


def _sizes(planner: Planner) -> dict[str, Any]:
    return {
        "page_size": planner.pool.page_size,
        "total_num_pages": planner.pool.total_num_pages,
        "num_groups": planner.pool.num_groups,
        "max_num_tokens": planner.max_num_tokens,
        "max_num_seqs": planner.max_num_seqs,
        "pages_per_seq": planner.pages_per_seq,
        "token_buckets": planner.token_buckets,
        "seq_buckets": planner.seq_buckets,
    }
