"""Step: a planned step as a lease on a planner's buffer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from pagemill import _core, device
from pagemill.batch import RaggedBatch, as_int32
from pagemill.errors import LeaseError, PagemillError
from pagemill.pool import Int32Array

if TYPE_CHECKING:
    from pagemill.planner import Planner


@dataclasses.dataclass(frozen=True)
class Views:
    """A buffer's arrays for one bucket, made once.

    Attributes:
      batches: one a KV group.
      positions: i32[max_num_tokens].
      logits_indices: i32[max_num_seqs].
      small: all arrays but the page tables, as one.
      memory: all of them.
      offsets: where each begins in it.
    """

    batches: tuple[RaggedBatch, ...]
    positions: Int32Array
    logits_indices: Int32Array
    small: Int32Array
    memory: Int32Array
    offsets: dict[str, int]


class Fences:
    """Which buffers wait for which arrays."""

    def __init__(self, core: _core.Planner) -> None:
        self._core = core
        self.pending: dict[int, tuple[Step, list[Any]]] = {}

    def add(self, step: Step, fence: Any) -> None:
        """Retires the step once the fence is ready.

        Raises:
          LeaseError: a fence that can never tell.
        """
        arrays = [
            leaf
            for leaf in jax.tree.leaves(fence)
            if isinstance(leaf, jax.Array)
        ]
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise LeaseError(
                "the fence is traced: inside jit nothing is ready yet. Retire "
                "the step where the compiled function was called."
            )
        if not arrays:
            raise LeaseError(
                "the fence holds no jax array. Pass an output of the "
                "computation that reads the step, or done=True once it is over."
            )
        self.pending[step.buffer] = (step, arrays)

    def poll(self) -> None:
        """Retires what is ready; never blocks.

        Raises:
          LeaseError: all of a fence was donated before it was seen ready. It is
            said once; the step can be retired anew.
        """
        for buffer, (step, arrays) in list(self.pending.items()):
            live = [array for array in arrays if not array.is_deleted()]
            if not live:
                del self.pending[buffer]
                step._retired = False
                raise LeaseError(
                    "every array of a step's fence was donated or deleted "
                    "before it was ready: nobody can tell when the step is "
                    "over. Pass an output that is not donated to the next "
                    "step, such as the attention's; or call this step's "
                    "retire(done=True) once it is over."
                )
            if all(array.is_ready() for array in live):
                del self.pending[buffer]
                self._core.retire(buffer)


class Step:
    """A planned step; made by :meth:`Planner.step`.

    Its arrays are read-only views of the planner's buffer. They stay as they
    are until the step is both closed (:meth:`commit` or :meth:`abort`) and
    retired (:meth:`retire`); then the next step may rewrite them.

    As a context manager it commits at the end, or, if an exception passes,
    aborts, unless it is closed by then, and requires that :meth:`retire` was
    called::

        with planner.step(requests) as step:
            out, kv_pages = attend(q, kv_pages, step.batch, k, v)
            step.retire(out)

    Where an exception passes before :meth:`retire`, nothing may have been
    launched: the buffer is taken back at once.
    """

    __slots__ = ("_closed", "_code", "_planner", "_retired", "buffer")

    def __init__(self, planner: Planner, code: int) -> None:
        self._planner = planner
        self._code = code
        self._closed = False
        self._retired = False
        planner._newest = self
        self.buffer = code % planner.ring

    @property
    def batch(self) -> RaggedBatch:
        """The metadata of the first KV group."""
        return self._planner._views_of(self._code).batches[0]

    @property
    def batches(self) -> tuple[RaggedBatch, ...]:
        """The metadata of every KV group."""
        return self._planner._views_of(self._code).batches

    @property
    def positions(self) -> Int32Array:
        """i32[max_num_tokens]: tokens' places in their sequences."""
        return self._planner._views_of(self._code).positions

    @property
    def logits_indices(self) -> Int32Array:
        """i32[max_num_seqs]: the last token of each row; dead ones 0."""
        return self._planner._views_of(self._code).logits_indices

    @property
    def order(self) -> Int32Array:
        """i32[num_seqs]: row r is request ``order[r]``; a copy."""
        return self._planner._core.order(self.buffer)

    @property
    def capacities(self) -> tuple[int, int]:
        """The buckets: max_num_seqs and max_num_tokens."""
        return self._planner._decode(self._code)[1:]

    @property
    def table_delta(self) -> tuple[Int32Array, Int32Array]:
        """What changed since the step planned before, for ``track_delta``.

        Returns:
          indices, pages: of the first KV group's flat page table, both i32[n]:
          ``table[indices] = pages`` brings a copy of it up to date. Copies;
          of the planner's last step only.

        Raises:
          LeaseError: another step was planned since, or track_delta is off.
        """
        if not self._planner.track_delta:
            raise LeaseError(
                "the planner does not track changes. Make it with "
                "track_delta=True."
            )
        if self._planner._newest is not self:
            raise LeaseError(
                "another step was planned since: its changes have replaced "
                "this one's. Take the delta before planning the next step."
            )
        core = self._planner._core
        return core.delta_indices(), core.delta_pages()

    def to_device(
        self,
        sharding: Any = None,
        table: device.DeviceTable | None = None,
    ) -> RaggedBatch:
        """The first group's batch as jax arrays, which retires the step.

        All arrays travel as one and are taken apart by a compiled program; the
        step is retired once that has run. With a table only what changed of the
        page table travels.

        Args:
          sharding: where to; the default device when None.
          table: the page table kept on the device.
        """
        views = self._planner._views_of(self._code)
        source = views.memory if table is None else views.small
        arrays = device.unpack(
            jax.device_put(source, sharding), views.batches[0], views.offsets
        )
        self.retire(arrays)
        pages = None
        if table is not None:
            table.update(*self.table_delta)
            pages = table.copy_rows(views.batches[0].max_num_seqs)
        return device.make_batch(views.batches[0], arrays, pages)

    def commit(self, accepted: Any = None) -> None:
        """Keeps the tokens and lets others find the pages they fill.

        Call it once the step's writes are certain to come before whatever is
        launched next: for a device that runs in order, after the launch.

        Args:
          accepted: i32[num_seqs]: of each row's tokens, how many to keep, the
            first ones; all when None. The rest, such as rejected speculative
            tokens, is taken back.

        Raises:
          PagemillError: the step is closed, or counts out of range, or a row
            that was planned again since has tokens to take back.
        """
        self._require_open()
        if accepted is not None:
            accepted = np.asarray(as_int32("accepted", accepted))
            if accepted.ndim != 1:
                raise PagemillError(
                    f"accepted has shape {accepted.shape}; it must be "
                    "one-dimensional: the tokens to keep of each row."
                )
        self._planner._core.commit(self.buffer, accepted)
        self._closed = True

    def abort(self) -> None:
        """Takes all of the step's tokens back.

        Raises:
          PagemillError: the step is closed, or a row was planned again or
            forked since.
        """
        self._require_open()
        self._planner._core.abort(self.buffer)
        self._closed = True

    def retire(self, fence: Any = None, *, done: bool = False) -> None:
        """Says when nothing reads the step's arrays and pages any more.

        Args:
          fence: outputs of the computation that reads them, arrays or a tree of
            arrays: the buffer is taken back once they are ready. An input is no
            fence: it is ready at once, while the computation still reads it.
          done: instead of a fence: the computation is over, or never began.

        Raises:
          LeaseError: neither or both are given, or the step was retired.
        """
        if self._retired:
            raise LeaseError("the step was retired already.")
        if done == (fence is not None):
            raise LeaseError(
                "retire() takes an output of the computation as fence, or "
                "done=True when it is over."
            )
        if done:
            self._planner._core.retire(self.buffer)
        else:
            self._planner._fences.add(self, fence)
        self._retired = True

    def __enter__(self) -> Step:
        """The step."""
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Commits, or aborts when an exception passes."""
        if error is None:
            if not self._closed:
                self.commit()
            if not self._retired:
                raise LeaseError(
                    "the step was not retired. Call step.retire with an output "
                    "of the computation that reads it."
                )
            return
        if not self._closed:
            self.abort()
        if not self._retired:
            self.retire(done=True)

    def _require_open(self) -> None:
        """The buffer of a closed step may be another step's by now."""
        if self._closed:
            raise PagemillError(
                "the step is closed: a step commits or aborts once."
            )
