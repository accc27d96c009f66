"""RaggedBatch: one step's metadata, as every op takes it."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from pagemill import _core
from pagemill import spec as spec_lib
from pagemill.errors import PagemillError, Problem
from pagemill.spec import INT32, Attribute, Operand, OpSpec, Relation

_INT32 = np.iinfo(np.int32)

_METADATA_DTYPE = (
    "The dtype of `kv_lens`, `page_indices`, and `cu_q_lens` must be int32. "
    "Got kv_lens.dtype={kv_lens.dtype!r}, "
    "page_indices.dtype={page_indices.dtype!r}, "
    "cu_q_lens.dtype={cu_q_lens.dtype!r}."
)
_METADATA_REMEDY = (
    "Build them as int32, or cast with .astype(np.int32) after checking that "
    "the values fit."
)

BATCH_OPERANDS = (
    Operand(
        "page_indices",
        ("S", "P"),
        INT32,
        dtype_message=_METADATA_DTYPE,
        dtype_remedy=_METADATA_REMEDY,
    ),
    Operand(
        "kv_lens",
        ("S",),
        INT32,
        shape_message=(
            "Expected kv_lens.shape={kv_lens.shape} to be {expected} "
            "where `max_num_seqs` is `page_indices.shape[0]`."
        ),
        shape_remedy="Give one KV length per row of page_indices.",
        dtype_message=_METADATA_DTYPE,
        dtype_remedy=_METADATA_REMEDY,
    ),
    Operand(
        "cu_q_lens",
        ("S + 1",),
        INT32,
        shape_message=(
            "Expected cu_q_lens.shape={cu_q_lens.shape} to be {expected}  "
            "where `max_num_seqs` is `page_indices.shape[0]`."
        ),
        shape_remedy=(
            "cu_q_lens needs max_num_seqs + 1 entries: a leading 0, then the "
            "running sum of query lengths; a slice of a longer sum that lost "
            "its first or last entry is the likely cause."
        ),
        dtype_message=_METADATA_DTYPE,
        dtype_remedy=_METADATA_REMEDY,
    ),
    Operand(
        "num_seqs",
        ("1",),
        INT32,
        shape_message="num_seqs.shape={num_seqs.shape} must be (1,)",
        shape_remedy="Pass np.array([n], np.int32).",
    ),
    Operand("distribution", ("3",), INT32, optional=True),
    Operand("slot_mapping", ("T",), INT32, optional=True),
)

BATCH = OpSpec(
    name="RaggedBatch",
    operands=BATCH_OPERANDS,
    attributes=tuple(
        Attribute(
            name,
            "int",
            required=True,
            rules=(
                (
                    f"0 < value <= {2**31 - 1}",
                    name + "={value} must be in range (0, 2147483647].",
                    "Pass the capacity that the arrays were built for.",
                ),
            ),
        )
        for name in ("page_size", "total_num_pages", "max_num_tokens")
    ),
    relations=(
        Relation(
            "min(S, P) > 0",
            "page_indices",
            "page_indices.shape={page_indices.shape} must not have a "
            "dimension of 0.",
            "Give it at least one row and column; an idle step has num_seqs 0.",
        ),
        Relation(
            "slot_mapping.shape[0] == max_num_tokens",
            "slot_mapping",
            "Expected slot_mapping.shape={slot_mapping.shape} to be "
            "({max_num_tokens},).",
            "Give one slot per row of the token buffer; -1 for dead rows.",
        ),
    ),
)

ARRAYS = (
    "kv_lens",
    "page_indices",
    "cu_q_lens",
    "num_seqs",
    "distribution",
    "slot_mapping",
)
# As the core numbers them.
LEVELS = {
    "structure": int(_core.Level.STRUCTURE),
    "full": int(_core.Level.FULL),
}
STATICS = ("page_size", "total_num_pages", "max_num_tokens")


def as_int32(name: str, value: Any) -> Any:
    """Metadata as int32, without loss and without a copy where possible.

    Lists, and integers of other widths, signs and byte orders, are converted
    once their values are seen to fit; strided arrays are made contiguous. A
    jax array must be int32 already.

    Args:
      name: what to call the array in an error.
      value: anything numpy can read as integers, or a jax array or tracer.

    Returns:
      A C-contiguous int32 numpy array, or the jax array itself.

    Raises:
      PagemillError: not integers, or a value that int32 cannot hold.
    """
    if isinstance(value, jax.Array):
        if value.dtype != np.int32:
            raise _one_problem(
                name,
                f"The dtype of `{name}` must be int32. Got {value.dtype}.",
                f"Cast it: {name}.astype(jnp.int32).",
            )
        return value
    if hasattr(value, "shape") and not isinstance(
        value, (np.ndarray, np.generic)
    ):
        return value  # A ShapeDtypeStruct or the like: the spec looks at it.
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise _one_problem(
            name,
            f"{name} cannot be read as an array of integers: {error}.",
            "Rows of unequal length must be padded first.",
        ) from None
    if array.dtype != np.int32:
        _require_int32_values(name, array)
    return np.ascontiguousarray(array, np.int32).reshape(array.shape)


def _require_int32_values(name: str, array: np.ndarray[Any, Any]) -> None:
    if array.size == 0 and array.dtype == np.float64:
        return  # np.asarray([]): no value says otherwise.
    # Integers beyond 64 bits, which numpy keeps as objects.
    huge = array.dtype == object and all(
        isinstance(value, int) for value in array.flat
    )
    if array.dtype.kind not in "iu" and not huge:
        raise _one_problem(
            name,
            f"The dtype of `{name}` must be int32. Got {array.dtype}.",
            "Metadata counts tokens and pages: pass integers.",
        )
    outside = (array < _INT32.min) | (array > _INT32.max)
    if not np.any(outside):
        return
    places = [tuple(map(int, place)) for place in np.argwhere(outside)]
    problems = [
        Problem(
            name,
            f"{name}[{', '.join(map(str, place))}]={array[place]} does not "
            "fit int32.",
            "Fix the producer of this value; it would wrap to a wrong one.",
        )
        for place in places
    ]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    first = problems[0]
    raise PagemillError(f"{first.message} {first.remedy}{more}", problems)


def prove(
    batch: RaggedBatch,
    level: str,
    sliding_window: int = 0,
    smem_budget_bytes: int = 0,
) -> None:
    """Checks the values of a batch whose arrays are on the host.

    Args:
      batch: the batch.
      level: a key of LEVELS.
      sliding_window: keys that a query sees, itself included; 0 for all.
      smem_budget_bytes: scalar memory of a kernel; 0 for any.

    Raises:
      PagemillError: with every violation.
    """
    violations = find_violations(
        batch, level, sliding_window, smem_budget_bytes
    )
    if violations is not None:
        raise PagemillError(None, violations)


def find_violations(
    batch: RaggedBatch,
    level: str,
    sliding_window: int = 0,
    smem_budget_bytes: int = 0,
) -> _core.Violations | None:
    """What prove() raises of; None when there is nothing."""
    return host_batch(batch).validate(
        LEVELS[level], sliding_window, smem_budget_bytes
    )


def host_batch(batch: RaggedBatch) -> _core.HostBatch:
    """The core's view; kept where the arrays are numpy's for good."""
    kept: _core.HostBatch | None = batch.__dict__.get("_host")
    if kept is not None:
        return kept
    arrays = [getattr(batch, name) for name in ARRAYS]
    ours: list[Any] = [
        None if a is None else np.ascontiguousarray(a) for a in arrays
    ]
    statics = [getattr(batch, name) for name in STATICS]
    arguments: tuple[Any, ...] = (*ours, *statics)
    host = _core.HostBatch(*arguments)
    if all(new is old for new, old in zip(ours, arrays, strict=True)):
        object.__setattr__(batch, "_host", host)
    return host


def known(array: Any) -> bool:
    """Its values can be read here and now, without waiting for a device."""
    if isinstance(array, jax.core.Tracer):
        return False
    if isinstance(array, jax.Array):
        return all(device.platform == "cpu" for device in array.devices())
    return isinstance(array, np.ndarray)


def _one_problem(name: str, message: str, remedy: str) -> PagemillError:
    return PagemillError(
        f"{message} {remedy}", [Problem(name, message, remedy)]
    )


class BatchTree:
    """A batch's arrays as the leaves of a pytree, its sizes as the rest."""

    def tree_flatten_with_keys(
        self,
    ) -> tuple[list[tuple[Any, Any]], tuple[int, ...]]:
        """The arrays by name, and the static rest."""
        leaves = [
            (jax.tree_util.GetAttrKey(name), getattr(self, name))
            for name in ARRAYS
        ]
        return leaves, tuple(getattr(self, name) for name in STATICS)

    @classmethod
    def tree_unflatten(cls, statics: tuple[int, ...], leaves: Any) -> Self:
        """Rebuilds without checks: leaves may be tracers or placeholders."""
        batch = object.__new__(cls)
        for name, value in zip(ARRAYS, leaves, strict=True):
            object.__setattr__(batch, name, value)
        for name, static in zip(STATICS, statics, strict=True):
            object.__setattr__(batch, name, static)
        return batch


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RaggedBatch(BatchTree):
    """One step's metadata: a pytree whose arrays are leaves, the rest static.

    Takes numpy or jax arrays or lists; int32 and contiguous arrays are kept
    without a copy, other integers are checked before they are narrowed.

    Attributes:
      kv_lens: i32[max_num_seqs], KV length of each sequence including this
        step's tokens.
      page_indices: i32[max_num_seqs, pages_per_seq], page ids of each
        sequence in order. Slots past ``ceil(kv_len / page_size)`` are dead.
      cu_q_lens: i32[max_num_seqs + 1], 0 and the running sum of query
        lengths; entries past num_seqs repeat the total.
      num_seqs: i32[1], live sequences. Rows behind it are dead: they may
        hold anything.
      distribution: i32[3] or None: (i, j, k), rows [0, i) decode, [i, j)
        prefill chunks of one length, [j, k) mixed, k = num_seqs.
      slot_mapping: i32[max_num_tokens] or None: token to
        ``page * page_size + offset``; -1 for dead tokens.
      page_size: tokens per page.
      total_num_pages: pages in the KV cache.
      max_num_tokens: rows of the token buffer.

    Raises:
      PagemillError: shapes or dtypes that do not fit together (the values are
        for :func:`pagemill.validate`).
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

    def __post_init__(self) -> None:
        for name in ARRAYS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, as_int32(name, value))
        statics = spec_lib.check(
            BATCH,
            {name: getattr(self, name) for name in ARRAYS},
            {name: getattr(self, name) for name in STATICS},
        )
        for name, value in statics.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_planned(cls, arrays: Any, statics: tuple[int, ...]) -> RaggedBatch:
        """The planner's own arrays, which need no checks.

        Args:
          arrays: has every array as an attribute.
          statics: page_size, total_num_pages and max_num_tokens.
        """
        return cls.tree_unflatten(
            statics, [getattr(arrays, name) for name in ARRAYS]
        )

    @property
    def max_num_seqs(self) -> int:
        """Rows of page_indices."""
        return int(self.page_indices.shape[0])

    @property
    def pages_per_seq(self) -> int:
        """Slots in a row of page_indices."""
        return int(self.page_indices.shape[1])

    def __getstate__(self) -> dict[str, Any]:
        """The fields: the core's view of them is made anew."""
        return {n: v for n, v in self.__dict__.items() if n != "_host"}
