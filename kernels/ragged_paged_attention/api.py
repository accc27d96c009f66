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
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kernels.ragged_paged_attention.reference import (
    ragged_paged_attention_xla,
)
from pagemill.kernels.ragged_paged_attention.spec import (
    COPY_PAGES,
    RAGGED_PAGED_ATTENTION,
    UPDATE_KV_PAGES,
    for_layout,
)
from pagemill.kernels.ragged_paged_attention.tpu import (
    ragged_paged_attention_tpu,
)
from pagemill.kv_cache import (
    KVLayout,
    as_layout,
    page_size_of,
    with_lanes,
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
    mask_value: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    tree_mask: Any = None,
    return_lse: bool = False,
    kv_layout: KVLayout | str = KVLayout.INTERLEAVED,
    num_kv_heads: int | None = None,
    v_head_dim: int | None = None,
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
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim], K at
        even, V at odd combined heads, or as ``kv_layout`` says; q's dtype,
        float8_e4m3fn, float8_e5m2 or int8.
      batch: a :class:`RaggedBatch`, or (kv_lens, page_indices, cu_q_lens,
        num_seqs) as there.
      k: None or [max_num_tokens, num_kv_heads, head_dim]: this step's keys.
        8-bit pages take float32 and bfloat16 too: divided by k_scale, rounded
        to the nearest and kept finite.
      v: as k: this step's values; [max_num_tokens, num_kv_heads, v_head_dim].
      sm_scale: factor on the logits; None stands for head_dim ** -0.5.
      causal: a query sees no key past its own position.
      sliding_window: keys that a query keeps, itself included; None: all.
      soft_cap: soft_cap * tanh(logit / soft_cap), before masking; None: off.
      mask_value: a masked key counts exactly 0; a value, which must be at most
        -1e30, changes nothing.
      sinks: None or [num_q_heads]: a logit per head that takes its share of
        the softmax, and has no value.
      k_scale: None, or f32, a scalar or [num_kv_heads]: what is stored times
        this is K. Traced: a new one compiles nothing.
      v_scale: as k_scale, for V.
      tree_mask: None or u32 [max_num_tokens, words], in place of ``causal``:
        bit j % 32 of word j // 32 says whether a token sees the j-th token of
        its sequence in this step. Older keys are seen by all.
      return_lse: also return the log-sum-exp of each row's logits.
      kv_layout: how kv_pages is laid out, a :class:`KVLayout` or its value.
      num_kv_heads: where kv_pages' shape leaves it open: packed pages that end
        in padding.
      v_head_dim: size of V's heads where it is another than that of q and K;
        kv_pages then has the larger of the two, and 0 behind the smaller, as
        :class:`KVCacheSpec` and the writes of this step do it. None stands
        for head_dim.
      tuning: how the TPU kernel cuts its work.
      implementation: None for the platform's own, or "tpu", "cpu", "xla",
        "interpret" (the TPU kernel in its interpreter, with races and reads
        out of bounds raised). An explicit one never falls back.

    Returns:
      out, shaped and typed like q, of v_head_dim; then, as far as asked for,
      lse f32 [max_num_tokens, num_q_heads] and kv_pages, as a tuple. Dead
      rows, and rows with no visible key, are 0; their lse is -inf (or the
      sink).

    Raises:
      PagemillError: shapes, dtypes or options that do not fit: all of them.
        Outside of jit wrong values of host metadata as well; inside, on
        CPUs, these raise when the program runs, as jax's runtime error with
        the text of :func:`pagemill.validate`.
      UnsupportedError: ``implementation`` cannot run on this platform.
    """
    dispatch.check_implementation(implementation)
    layout = as_layout(kv_layout)
    tuning = _as_tuning(tuning)
    operands = Operands(
        q,
        kv_pages,
        *_metadata(batch),
    )._replace(
        sinks=sinks,
        k_scale=_as_scale("k_scale", k_scale),
        v_scale=_as_scale("v_scale", v_scale),
        tree_mask=tree_mask,
    )
    options = spec.check(
        for_layout(RAGGED_PAGED_ATTENTION, layout),
        {
            **_to_check(operands),
            "k": k,
            "v": v,
            "batch": batch if isinstance(batch, RaggedBatch) else None,
        },
        {
            "sm_scale": sm_scale,
            "causal": causal,
            "sliding_window": sliding_window,
            "soft_cap": soft_cap,
            "mask_value": mask_value,
            "return_lse": return_lse,
            "num_kv_heads": num_kv_heads,
            "v_head_dim": v_head_dim,
            **dataclasses.asdict(tuning),
        },
        platform="tpu" if implementation in ("tpu", "interpret") else None,
    )
    _refuse_one_of_two(k, v)
    params = _pick(AttentionParams, options | {"kv_layout": layout})
    batch = _as_batch(batch, operands, layout)
    _prove_known(batch, sliding_window or 0)
    operands = _as_arrays(operands, params)
    if k is not None:
        operands = operands._replace(
            kv_pages=update.update_kv_pages(
                operands.kv_pages,
                jnp.asarray(k),
                jnp.asarray(v),
                jnp.asarray(_slots(batch)),
                k_scale=operands.k_scale,
                v_scale=operands.v_scale,
                layout=layout,
                implementation=implementation,
            )
        )
    values = options["v_head_dim"]
    wide = max(values, operands.head_dim)
    out, *lse = _attend(
        operands._replace(q=with_lanes(operands.q, wide)),
        implementation=implementation,
        params=params,
        tuning=_pick(Tuning, options),
    )
    written = () if k is None else (operands.kv_pages,)
    results = (out[..., :values], *lse, *written)
    return results if len(results) > 1 else results[0]


def _as_tuning(tuning: Any) -> Tuning:
    if tuning is None:
        return Tuning()
    if not isinstance(tuning, Tuning):
        raise PagemillError(
            f"tuning is a {type(tuning).__name__}; it must be a "
            "pagemill.Tuning or None."
        )
    return tuning


def _as_scale(name: str, scale: Any) -> Any:
    """A scale as an f32 array; scalars stay scalars.

    Raises:
      PagemillError: no number, or known and not positive and finite.
    """
    if scale is None or isinstance(scale, jax.core.Tracer):
        return scale
    if not hasattr(scale, "dtype"):
        try:
            scale = np.asarray(scale, np.float32)
        except (TypeError, ValueError):
            raise PagemillError(
                f"{name}={scale!r} must be a number or an array of numbers."
            ) from None
    if isinstance(scale, np.ndarray | np.generic) and scale.dtype.kind == "f":
        scale = np.asarray(scale, np.float32)
    if known(scale):
        values = np.asarray(scale, np.float32)
        if not (np.isfinite(values) & (values > 0)).all():
            raise PagemillError(
                f"{name}={values} must be positive and finite. What is stored "
                "times the scale is the key or value."
            )
    return scale


def _to_check(operands: Operands) -> dict[str, Any]:
    """Operands by name; scalars among the scales need no check."""
    found = operands._asdict()
    for name in ("k_scale", "v_scale"):
        if found[name] is not None and np.ndim(found[name]) == 0:
            found[name] = None
    return found


def _as_arrays(operands: Operands, params: AttentionParams) -> Operands:
    """As the implementations take them: f32 sinks, a scale per KV head."""

    def scales(scale: Any) -> Any:
        if scale is None:
            return None
        scale = jnp.asarray(scale, jnp.float32)
        return jnp.broadcast_to(scale, (params.num_kv_heads,))

    arrays: Operands = jax.tree.map(jnp.asarray, operands)
    sinks = arrays.sinks
    return arrays._replace(
        sinks=None if sinks is None else sinks.astype(jnp.float32),
        k_scale=scales(operands.k_scale),
        v_scale=scales(operands.v_scale),
    )


def _refuse_one_of_two(k: Any, v: Any) -> None:
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise PagemillError(
            f"{missing} is missing. Pass both k and v to write this step's "
            "keys and values, or neither."
        )


def update_kv_pages(
    kv_pages: Any,
    k: Any,
    v: Any,
    batch: RaggedBatch,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_layout: KVLayout | str = KVLayout.INTERLEAVED,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Writes this step's keys and values into their pages.

    Args:
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim], or as
        ``kv_layout`` says; donate it under jit, so that it is written in
        place.
      k: [max_num_tokens, num_kv_heads, head_dim], kv_pages' dtype. 8-bit pages
        take float32 and bfloat16 too: divided by k_scale, rounded to the
        nearest and kept finite.
      v: as k, with a head_dim of its own: where kv_pages is wider than one,
        0 is written behind it.
      batch: says where each token goes. Dead tokens are not written.
      k_scale: None, or f32, a scalar or [num_kv_heads]; for 8-bit pages.
      v_scale: as k_scale.
      kv_layout: a :class:`KVLayout` or its value.
      implementation: as :func:`ragged_paged_attention` takes it: a kernel on
        TPUs, a scatter elsewhere.

    Returns:
      The updated pages.

    Raises:
      PagemillError: shapes or dtypes that do not fit; outside of jit also
        wrong values of the batch.
      UnsupportedError: ``implementation`` cannot run on this platform.
    """
    dispatch.check_implementation(implementation)
    if not isinstance(batch, RaggedBatch):
        raise PagemillError(
            f"batch is a {type(batch).__name__}; it must be a RaggedBatch."
        )
    layout = as_layout(kv_layout)
    scales = {
        "k_scale": _as_scale("k_scale", k_scale),
        "v_scale": _as_scale("v_scale", v_scale),
    }
    spec.check(
        for_layout(UPDATE_KV_PAGES, layout),
        {
            "kv_pages": kv_pages,
            "k": k,
            "v": v,
            "slot_mapping": _slots(batch),
            "batch": batch,
            **{n: x for n, x in scales.items() if np.ndim(x) > 0},
        },
    )
    _prove_known(batch)

    def per_head(scale: Any) -> Any:
        return (
            None
            if scale is None
            else jnp.broadcast_to(jnp.asarray(scale), (k.shape[1],))
        )

    return update.update_kv_pages(
        *map(jnp.asarray, (kv_pages, k, v, _slots(batch))),
        **{name: per_head(scale) for name, scale in scales.items()},
        layout=layout,
        implementation=implementation,
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


def _as_batch(batch: Any, operands: Operands, layout: KVLayout) -> RaggedBatch:
    if isinstance(batch, RaggedBatch):
        return batch
    return RaggedBatch(
        **{name: getattr(operands, name) for name in _METADATA},
        page_size=page_size_of(operands.kv_pages, layout),
        total_num_pages=operands.kv_pages.shape[0],
        max_num_tokens=operands.max_num_tokens,
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


def _interpret(operands: Operands, **options: Any) -> tuple[jax.Array, ...]:
    return ragged_paged_attention_tpu(
        operands,
        **options,
        interpret=pltpu.InterpretParams(
            detect_races=True,
            out_of_bounds_reads="raise",
            uninitialized_memory="nan",
        ),
    )


def _xla(
    operands: Operands, *, params: AttentionParams, tuning: Tuning
) -> tuple[jax.Array, ...]:
    del tuning  # Cuts the work of the TPU kernel only.
    return ragged_paged_attention_xla(operands, params=params)


def _tpu(
    operands: Operands, *, params: AttentionParams, tuning: Tuning
) -> tuple[jax.Array, ...]:
    # Only now, lowering, is it known that this is for a TPU.
    options = dataclasses.asdict(params) | dataclasses.asdict(tuning)
    del options["kv_layout"]
    spec.check(
        for_layout(RAGGED_PAGED_ATTENTION, params.kv_layout),
        operands._asdict(),
        options,
        platform="tpu",
    )
    return ragged_paged_attention_tpu(operands, params=params, tuning=tuning)


def _results(
    operands: Operands, *, params: AttentionParams, tuning: Tuning
) -> tuple[Any, ...]:
    del tuning
    q = operands.q
    lse = q.update(shape=q.shape[:2], dtype=jnp.dtype(jnp.float32))
    return (q, lse) if params.return_lse else (q,)


_attend = dispatch.make_op(
    "pagemill_ragged_paged_attention",
    Implementations(
        cpu=ragged_paged_attention_cpu,
        tpu=_tpu,
        xla=_xla,
        interpret=_interpret,
    ),
    _results,
)
