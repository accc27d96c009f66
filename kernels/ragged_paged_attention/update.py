"""Writing paged KV: by a kernel on TPUs, elsewhere scatters in plain jnp."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from pagemill import dispatch
from pagemill.dispatch import Implementation, Implementations
from pagemill.kernels.ragged_paged_attention.write import write_kv_pages_tpu
from pagemill.kv_cache import (
    KVLayout,
    join_heads,
    page_size_of,
    with_lanes,
)


def slot_mapping(
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    max_num_tokens: int,
    page_size: int,
    total_num_pages: int,
) -> jax.Array:
    """Where each token of a batch goes.

    Returns:
      i32[max_num_tokens]: ``page * page_size + offset``; -1 for dead tokens,
      and for those that wrong metadata sends nowhere.
    """
    rows = page_indices.shape[0]
    live = jnp.clip(num_seqs[0], 0, rows)
    token = jnp.arange(max_num_tokens, dtype=jnp.int32)
    # Rows behind num_seqs may hold anything: they end where the live ones do.
    ends = jnp.where(jnp.arange(rows) < live, cu_q_lens[1:], cu_q_lens[live])
    seq = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq, rows - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token
    column = position // page_size
    page = page_indices[seq, jnp.clip(column, 0, page_indices.shape[1] - 1)]
    slot = page * page_size + position % page_size
    total = jnp.where(live > 0, cu_q_lens[live], 0)
    sound = (token < total) & (position >= 0)
    sound &= (column < page_indices.shape[1]) & (page >= 0)
    return jnp.where(sound & (page < total_num_pages), slot, jnp.int32(-1))


def update_kv_pages(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    *,
    layout: KVLayout = KVLayout.INTERLEAVED,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Writes token t's k and v into slot slots[t]; -1 writes nothing."""
    wide = max(k.shape[-1], v.shape[-1])
    k = with_lanes(quantised(k, k_scale, kv_pages.dtype), wide)
    v = with_lanes(quantised(v, v_scale, kv_pages.dtype), wide)
    operands = _Operands(kv_pages, k, v, slots)
    (written,) = _write(operands, implementation=implementation, layout=layout)
    return written


class _Operands(NamedTuple):
    kv_pages: jax.Array
    k: jax.Array  # [T, Hkv, D], kv_pages' dtype
    v: jax.Array
    slots: jax.Array  # i32[T]


def _scatter(operands: _Operands, *, layout: KVLayout) -> tuple[jax.Array]:
    kv_pages, k, v, slots = operands
    pages, page_size = kv_pages.shape[0], page_size_of(kv_pages, layout)
    # A negative index would count from the end: send it past it instead.
    slots = jnp.where(slots < 0, pages * page_size, slots)
    if layout is KVLayout.PLANES:
        kv = with_lanes(jnp.stack([k, v], axis=1), kv_pages.shape[-1])
        page, offset = slots // page_size, slots % page_size
        return (kv_pages.at[page, :, :, offset].set(kv, mode="drop"),)
    kv = join_heads(k, v, kv_pages.shape)
    flat = kv_pages.reshape(pages * page_size, *kv_pages.shape[2:])
    return (flat.at[slots].set(kv, mode="drop").reshape(kv_pages.shape),)


def _tpu(
    operands: _Operands, *, layout: KVLayout, interpret: Any = False
) -> tuple[jax.Array]:
    written = write_kv_pages_tpu(*operands, layout=layout, interpret=interpret)
    return (written,)


_write = dispatch.make_op(
    "pagemill_update_kv_pages",
    Implementations(
        cpu=_scatter,
        tpu=_tpu,
        xla=_scatter,
        interpret=functools.partial(
            _tpu,
            interpret=pltpu.InterpretParams(
                detect_races=True,
                out_of_bounds_reads="raise",
                uninitialized_memory="nan",
            ),
        ),
    ),
    lambda operands, **_: (operands.kv_pages,),
)


def quantised(
    x: jax.Array, scale: jax.Array | None, dtype: np.dtype[Any]
) -> jax.Array:
    """Keys or values as a cache of ``dtype`` holds them.

    What is stored times ``scale`` is x, rounded to the nearest, ties to even,
    and kept finite: beyond the type's range it is the type's largest.

    Args:
      x: [T, Hkv, D].
      scale: f32[Hkv] or None.
      dtype: of the cache.
    """
    if x.dtype == dtype:
        return x
    wide = x.astype(jnp.float32)
    if scale is not None:
        wide = wide / scale[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        least, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
        return jnp.clip(jnp.round(wide), least, largest).astype(dtype)
    limit = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    return jnp.clip(wide, -limit, limit).astype(dtype)


def copy_pages(kv_pages: jax.Array, copies: jax.Array) -> jax.Array:
    """Page copies[i, 0] to copies[i, 1]; a pair out of range is dropped."""
    source, target = copies[:, 0], copies[:, 1]
    pages = kv_pages.shape[0]
    # Negative indices would count from the end, and high sources be clamped.
    sound = (source >= 0) & (source < pages) & (target >= 0)
    return kv_pages.at[jnp.where(sound, target, pages)].set(
        kv_pages[jnp.where(sound, source, 0)], mode="drop"
    )
