"""validate(): proves a batch's values, on the host, in C++."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np

from pagemill import _core
from pagemill.batch import ARRAYS, LEVELS, RaggedBatch, find_violations
from pagemill.errors import PagemillError
from pagemill.params import SMEM_BYTES, SMEM_RESERVE
from pagemill.pool import as_count

CheckCode = _core.CheckCode


def validate(
    batch: RaggedBatch | None = None,
    *,
    kv_lens: Any = None,
    page_indices: Any = None,
    cu_q_lens: Any = None,
    num_seqs: Any = None,
    distribution: Any = None,
    slot_mapping: Any = None,
    page_size: int | None = None,
    total_num_pages: int | None = None,
    max_num_tokens: int | None = None,
    sliding_window: int | None = None,
    tpu: str | None = None,
    level: Literal["structure", "full"] = "full",
) -> None:
    """Checks every invariant of a batch and names all that are broken.

    Takes a :class:`RaggedBatch`, or the bare arrays and sizes that make one.
    Arrays on the host (numpy, jax on CPU) are read in place.

    Args:
      batch: the batch; excludes the arguments that follow.
      kv_lens: i32[max_num_seqs], lengths including this step's tokens.
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1] or an int.
      distribution: i32[3] or None.
      slot_mapping: i32[max_num_tokens] or None.
      page_size: tokens per page.
      total_num_pages: pages in the KV cache.
      max_num_tokens: rows of the token buffer.
      sliding_window: number of keys that a query sees, itself included; page
        slots that a row's window has passed may then hold anything.
      tpu: a TPU generation (a key of ``pagemill.params.SMEM_BYTES``) whose
        scalar memory must hold the metadata; checked at level ``"full"``.
      level: ``"structure"`` checks lengths, order, ranges and capacities;
        ``"full"`` also page ownership (a page written this step belongs to one
        sequence, shared pages are read only) and that decode and prefill
        ranges hold what they say.

    Raises:
      PagemillError: with every violation, in order, in ``.violations``.
    """
    require_level(level)
    window = 0 if sliding_window is None else as_window(sliding_window)
    budget = 0 if tpu is None else _smem_budget(tpu)
    given = not (
        kv_lens
        is page_indices
        is cu_q_lens
        is num_seqs
        is distribution
        is slot_mapping
        is page_size
        is total_num_pages
        is max_num_tokens
        is None
    )
    # Otherwise it was looked at before: a batch of numpy arrays.
    if given or type(batch) is not RaggedBatch or "_host" not in vars(batch):
        bare = {
            "kv_lens": kv_lens,
            "page_indices": page_indices,
            "cu_q_lens": cu_q_lens,
            "num_seqs": num_seqs,
            "distribution": distribution,
            "slot_mapping": slot_mapping,
            "page_size": page_size,
            "total_num_pages": total_num_pages,
            "max_num_tokens": max_num_tokens,
        }
        if batch is None:
            batch = _make_batch(bare)
        else:
            _refuse_both(batch, bare)
        _refuse_unknown_values(batch)
    # Not prove(), for one traceback entry less.
    violations = find_violations(batch, level, window, budget)
    if violations is not None:
        raise PagemillError(None, violations)


def as_window(value: Any) -> int:
    """A sliding window as the core takes it.

    Raises:
      PagemillError: anything but a positive int32.
    """
    window = as_count("sliding_window", value)
    if not 0 < window < 2**31:
        raise PagemillError(
            f"sliding_window={window} must be in range [1, 2147483647]. Count "
            "the keys that a query sees, itself included, or pass None."
        )
    return window


def _smem_budget(tpu: Any) -> int:
    if tpu not in SMEM_BYTES:
        raise PagemillError(
            f"tpu={tpu!r} must be one of {', '.join(SMEM_BYTES)}. Name the "
            "generation that the kernel will run on."
        )
    return SMEM_BYTES[tpu] - SMEM_RESERVE


def require_level(level: Any) -> None:
    """Refuses a level that is not one of LEVELS.

    Raises:
      PagemillError: for any other value.
    """
    if not isinstance(level, str) or level not in LEVELS:
        raise PagemillError(
            f"level={level!r} must be one of {sorted(LEVELS)}. "
            "Pass level='full' unless ownership is known to hold."
        )


def _make_batch(bare: dict[str, Any]) -> RaggedBatch:
    missing = [
        name
        for name, value in bare.items()
        if value is None and name not in ("distribution", "slot_mapping")
    ]
    if missing:
        raise PagemillError(
            f"validate() lacks {', '.join(missing)}. "
            "Pass a RaggedBatch, or all arrays and sizes by name."
        )
    num_seqs = bare["num_seqs"]
    if np.ndim(num_seqs) == 0:
        one = (
            num_seqs
            if isinstance(num_seqs, jax.Array)
            else np.asarray(num_seqs)
        )
        bare["num_seqs"] = one.reshape(1)
    return RaggedBatch(**bare)


def _refuse_both(batch: Any, bare: dict[str, Any]) -> None:
    given = [name for name, value in bare.items() if value is not None]
    if not isinstance(batch, RaggedBatch):
        raise PagemillError(
            f"batch is a {type(batch).__name__}, not a RaggedBatch. "
            "Pass bare arrays by name: validate(kv_lens=..., ...)."
        )
    if given:
        raise PagemillError(
            f"validate() got a batch and also {', '.join(given)}. "
            "Pass one or the other."
        )


def _refuse_unknown_values(batch: RaggedBatch) -> None:
    arrays = {n: v for n in ARRAYS if (v := getattr(batch, n)) is not None}
    traced = [n for n, v in arrays.items() if isinstance(v, jax.core.Tracer)]
    if traced:
        raise PagemillError(
            f"validate() needs values, but {', '.join(traced)} are traced: "
            "inside jit they are not known yet. Call validate on the host, "
            "before the compiled function, or checked(batch) inside it."
        )
    for name, value in arrays.items():
        if not isinstance(value, (np.ndarray, jax.Array)):
            raise PagemillError(
                f"validate() needs values, but {name} is a "
                f"{type(value).__name__}. Pass numpy or jax arrays."
            )
