"""Writing keys and values into pages on TPUs, in place.

A scatter into tiled pages is slow on TPUs, so this step's tokens are copied by
DMA. They are taken in *runs*: tokens one behind the other whose slots are too.
Elements are moved as integers, so that every bit stays what it is.

In interleaved and packed pages a token is rows of its own: runs go from HBM to
HBM as they are. In planes a token is a row of a tile in each (K/V, head) plane:
such a tile, see write_planes, is read, changed and written back.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.ragged_paged_attention.write_planes import write_planes
from pagemill.kernels.ragged_paged_attention.write_runs import (
    padded,
    run_lengths,
)
from pagemill.kv_cache import KVLayout, join_heads, page_size_of, with_lanes

# Tokens whose slots lie in scalar memory at a time.
_BLOCK = 2048
# Tokens of a long copy; the others go one by one.
_LONG = 8


def write_kv_pages_tpu(
    kv_pages: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    layout: KVLayout,
    interpret: Any = False,
) -> jax.Array:
    """Writes token t's k and v into slot slots[t], if there is such a slot.

    Args:
      kv_pages: of ``layout``; written in place where it is donated.
      k: [T, Hkv, D], kv_pages' dtype.
      v: as k.
      slots: i32[T].
      layout: of kv_pages.
      interpret: False, or pltpu.InterpretParams to run on a CPU.

    Returns:
      The pages.
    """
    if slots.shape[0] == 0:
        return kv_pages
    page_size = page_size_of(kv_pages, layout)
    total = kv_pages.shape[0] * page_size
    slots = jnp.where((slots >= 0) & (slots < total), slots, jnp.int32(-1))
    if layout is KVLayout.PLANES:
        kv = with_lanes(jnp.stack([k, v], axis=1), kv_pages.shape[-1])
        return write_planes(kv_pages, kv, slots, interpret=interpret)
    kv = join_heads(k, v, kv_pages.shape)
    flat = kv_pages.reshape(total, *kv_pages.shape[2:])
    return _write_rows(flat, kv, slots, interpret).reshape(kv_pages.shape)


def _write_rows(
    flat: jax.Array, kv: jax.Array, slots: jax.Array, interpret: Any
) -> jax.Array:
    """Flat[slots[t]] = kv[t]."""
    tokens = slots.shape[0]
    block = min(_BLOCK, -(-tokens // _LONG) * _LONG)
    slots = padded(slots, block)
    in_smem = pl.BlockSpec((block,), lambda i: (i,), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(_rows_kernel, block),
        grid=(slots.shape[0] // block,),
        in_specs=[
            in_smem,
            in_smem,
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="write_kv_rows",
    )(slots, run_lengths(slots, block), kv, flat)


def _rows_kernel(
    block: int,
    slots: Any,
    lengths: Any,
    kv: Any,
    _: Any,
    flat: Any,
    arrived: Any,
) -> None:
    first = pl.program_id(0) * block

    def copy(token: Any, slot: Any, size: int) -> Any:
        return pltpu.make_async_copy(
            kv.at[pl.ds(token, size)], flat.at[pl.ds(slot, size)], arrived
        )

    def body(carry: Any) -> Any:
        token, long, short = carry
        slot = slots[token]
        live = slot >= 0
        whole = live & (lengths[token] >= _LONG)
        one = live & (lengths[token] < _LONG)

        @pl.when(whole)
        def _long() -> None:
            copy(first + token, slot, _LONG).start()

        @pl.when(one)
        def _short() -> None:
            copy(first + token, slot, 1).start()

        step = jnp.where(one, 1, jnp.where(live, _LONG, lengths[token]))
        return (
            token + step,
            long + whole.astype(jnp.int32),
            short + one.astype(jnp.int32),
        )

    zero = jnp.int32(0)
    _, long, short = lax.while_loop(
        lambda carry: carry[0] < block, body, (zero, zero, zero)
    )
    for count, size in ((long, _LONG), (short, 1)):

        def wait(_: Any, carry: Any, size: int = size) -> Any:
            copy(0, 0, size).wait()
            return carry

        lax.fori_loop(zero, count, wait, zero)
