"""The public functions over paged KV."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from pagemill import dispatch, spec
from pagemill.batch import ARRAYS, RaggedBatch, as_int32, known, prove
from pagemill.dispatch import Implementation, Implementations
from pagemill.errors import PagemillError
from pagemill.kernels.ragged_paged_attention import update
from pagemill.kernels.ragged_paged_attention.cpu import (
    ragged_paged_attention_cpu,
)
from pagemill.kernels.ragged_paged_attention.kernel import (
    ragged_paged_attention_tpu,
)
from pagemill.kernels.ragged_paged_attention.reference import (
    ragged_paged_attention_xla,
)
from pagemill.kernels.ragged_paged_attention.spec import (
    COPY_PAGES,
    RAGGED_PAGED_ATTENTION,
    UPDATE_KV_PAGES,
)
from pagemill.params import AttentionParams, Tuning

_METADATA = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")


def ragged_paged_attention(
    q: Any,
    kv_pages: Any,
    batch: RaggedBatch | tuple[Any, Any, Any, Any],
    *,
    k: Any = None,
    v: Any = None,
    sm_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    tuning: Tuning | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Attention of a ragged batch over paged keys and values.

    Query ``i`` of a sequence stands at position ``kv_len - q_len + i``: the
    last query sees the last key. With ``k`` and ``v`` this step's keys and
    values are first written where the batch says, and the pages returned too.

    Donate ``kv_pages`` under jit, so that they are written in place; and
    validate the batch first, since a program that fails has already consumed
    what was donated to it.

    Args:
      q: f32 or bf16 [max_num_tokens, num_q_heads, head_dim]. Rows behind the
        last live token may hold anything.
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim], q's
        dtype; K at even, V at odd combined heads.
      batch: a :class:`RaggedBatch`, or (kv_lens, page_indices, cu_q_lens,
        num_seqs) as there.
      k: None or [max_num_tokens, num_kv_heads, head_dim]: this step's keys.
      v: as k: this step's values.
      sm_scale: factor on the logits; None stands for head_dim ** -0.5.
      causal: a query sees no key past its own position.
      sliding_window: keys that a query keeps, itself included; None: all.
      soft_cap: soft_cap * tanh(logit / soft_cap), before masking; None: off.
      tuning: how the TPU kernel cuts its work.
      implementation: None for the platform's own, or "tpu", "cpu", "xla",
        "interpret" (the TPU kernel in its interpreter, with races and reads
        out of bounds raised). An explicit one never falls back.

    Returns:
      out, shaped and typed like q; or (out, kv_pages) with ``k`` and ``v``.
      Dead rows, and rows with no visible key, are 0.

    Raises:
      PagemillError: shapes, dtypes or options that do not fit: all of them.
        Outside of jit wrong values of host metadata as well; inside, on
        CPUs, these raise when the program runs, as jax's runtime error with
        the text of :func:`pagemill.validate`.
      UnsupportedError: ``implementation`` cannot run on this platform.
    """
    dispatch.check_implementation(implementation)
    metadata = _metadata(batch)
    tuning = Tuning() if tuning is None else tuning
    if not isinstance(tuning, Tuning):
        raise PagemillError(
            f"tuning is a {type(tuning).__name__}; it must be a "
            "pagemill.Tuning or None."
        )
    options = spec.check(
        RAGGED_PAGED_ATTENTION,
        {
            "q": q,
            "kv_pages": kv_pages,
            "k": k,
            "v": v,
            **dict(zip(_METADATA, metadata, strict=True)),
            "batch": batch if isinstance(batch, RaggedBatch) else None,
        },
        {
            "sm_scale": sm_scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "num_kv_pages_per_block": tuning.num_kv_pages_per_block,
            "num_queries_per_block": tuning.num_queries_per_block,
            "vmem_limit_bytes": tuning.vmem_limit_bytes,
        },
        platform="tpu" if implementation in ("tpu", "interpret") else None,
    )
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise PagemillError(
            f"{missing} is missing. Pass both k and v to write this step's "
            "keys and values, or neither."
        )
    batch = _as_batch(batch, metadata, q, kv_pages)
    _prove_known(batch, sliding_window or 0)
    if k is not None:
        kv_pages = update.update_kv_pages(
            *map(jnp.asarray, (kv_pages, k, v, _slots(batch)))
        )
    out = _attend(
        *map(jnp.asarray, (q, kv_pages, *metadata)),
        implementation=implementation,
        params=_pick(AttentionParams, options),
        tuning=_pick(Tuning, options),
    )
    return out if k is None else (out, kv_pages)


def update_kv_pages(
    kv_pages: Any, k: Any, v: Any, batch: RaggedBatch
) -> jax.Array:
    """Writes this step's keys and values into their pages.

    Args:
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim];
        donate it under jit, so that it is written in place.
      k: [max_num_tokens, num_kv_heads, head_dim], kv_pages' dtype.
      v: as k.
      batch: says where each token goes. Dead tokens are not written.

    Returns:
      The updated pages.

    Raises:
      PagemillError: shapes or dtypes that do not fit; outside of jit also
        wrong values of the batch.
    """
    if not isinstance(batch, RaggedBatch):
        raise PagemillError(
            f"batch is a {type(batch).__name__}; it must be a RaggedBatch."
        )
    spec.check(
        UPDATE_KV_PAGES,
        {
            "kv_pages": kv_pages,
            "k": k,
            "v": v,
            "slot_mapping": _slots(batch),
            "batch": batch,
        },
    )
    _prove_known(batch)
    return update.update_kv_pages(
        *map(jnp.asarray, (kv_pages, k, v, _slots(batch)))
    )


def copy_pages(kv_pages: Any, copies: Any) -> jax.Array:
    """Copies whole pages; all sources are read before a target is written.

    Args:
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim];
        donate it under jit, so that it is written in place.
      copies: i32[n, 2] of (source, target), as
        :meth:`pagemill.PagePool.take_page_copies` gives them.

    Returns:
      The updated pages.

    Raises:
      PagemillError: shapes or dtypes that do not fit, a page outside
        [0, total_num_pages), or two copies to one page. Under jit, where the
        values are not known, a pair out of range copies nothing.
    """
    copies = as_int32("copies", copies)
    if copies.shape == (0,):
        copies = copies.reshape(0, 2)
    spec.check(COPY_PAGES, {"kv_pages": kv_pages, "copies": copies})
    if known(copies):
        _check_copies(np.asarray(copies), kv_pages.shape[0])
    return update.copy_pages(*map(jnp.asarray, (kv_pages, copies)))


def _check_copies(
    copies: np.ndarray[Any, np.dtype[np.int32]], total_num_pages: int
) -> None:
    for i, pair in enumerate(copies.tolist()):
        if not all(0 <= page < total_num_pages for page in pair):
            raise PagemillError(
                f"copies[{i}]={pair} must be in range [0, {total_num_pages}). "
                "Take the copies from the pool of this cache."
            )
    targets, counts = np.unique(copies[:, 1], return_counts=True)
    if (counts > 1).any():
        raise PagemillError(
            f"page {targets[counts > 1][0]} is the target of several copies. "
            "Apply the copies of one take_page_copies() at a time."
        )


def _metadata(batch: Any) -> tuple[Any, ...]:
    if isinstance(batch, RaggedBatch):
        return tuple(getattr(batch, name) for name in _METADATA)
    if not isinstance(batch, (tuple, list)) or len(batch) != len(_METADATA):
        raise PagemillError(
            f"batch is a {type(batch).__name__}; it must be a RaggedBatch or "
            f"a tuple ({', '.join(_METADATA)})."
        )
    return tuple(
        as_int32(name, value)
        for name, value in zip(_METADATA, batch, strict=True)
    )


def _as_batch(
    batch: Any, metadata: tuple[Any, ...], q: Any, kv_pages: Any
) -> RaggedBatch:
    if isinstance(batch, RaggedBatch):
        return batch
    return RaggedBatch(
        **dict(zip(_METADATA, metadata, strict=True)),
        page_size=kv_pages.shape[1],
        total_num_pages=kv_pages.shape[0],
        max_num_tokens=q.shape[0],
    )


def _prove_known(batch: RaggedBatch, sliding_window: int = 0) -> None:
    """Outside of jit wrong values raise before anything is written."""
    arrays = (getattr(batch, name) for name in ARRAYS)
    if all(known(array) for array in arrays if array is not None):
        prove(batch, "structure", sliding_window)


def _slots(batch: RaggedBatch) -> Any:
    """i32[max_num_tokens]: as planned, or derived from the metadata."""
    if batch.slot_mapping is not None:
        return batch.slot_mapping
    return update.slot_mapping(
        *map(jnp.asarray, _metadata(batch)),
        max_num_tokens=batch.max_num_tokens,
        page_size=batch.page_size,
        total_num_pages=batch.total_num_pages,
    )


def _pick(bundle: Any, options: dict[str, Any]) -> Any:
    fields = bundle.__dataclass_fields__
    return bundle(**{name: options[name] for name in fields})


def _interpret(*operands: Any, **options: Any) -> jax.Array:
    return ragged_paged_attention_tpu(
        *operands,
        **options,
        interpret=pltpu.InterpretParams(
            detect_races=True,
            out_of_bounds_reads="raise",
            uninitialized_memory="nan",
        ),
    )


def _xla(*operands: Any, tuning: Tuning, **options: Any) -> jax.Array:
    del tuning  # Cuts the work of the TPU kernel only.
    return ragged_paged_attention_xla(*operands, **options)


def _tpu(*operands: Any, params: AttentionParams, tuning: Tuning) -> jax.Array:
    # Only now, lowering, is it known that this is for a TPU.
    spec.check(
        RAGGED_PAGED_ATTENTION,
        dict(zip(("q", "kv_pages", *_METADATA), operands, strict=True)),
        dataclasses.asdict(params) | dataclasses.asdict(tuning),
        platform="tpu",
    )
    return ragged_paged_attention_tpu(*operands, params=params, tuning=tuning)


_attend = dispatch.make_op(
    "pagemill_ragged_paged_attention",
    Implementations(
        cpu=ragged_paged_attention_cpu,
        tpu=_tpu,
        xla=_xla,
        interpret=_interpret,
    ),
)
