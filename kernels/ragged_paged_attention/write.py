"""Writing keys and values into pages on TPUs, in place.

A scatter into tiled pages is slow on TPUs, so this step's tokens are copied by
DMA. They are taken in *runs*: tokens one behind the other whose slots are too.

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
# Tokens that are copied at once if they are of one run.
_GROUP = 8


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
        integer = jnp.dtype(f"int{8 * kv_pages.dtype.itemsize}")
        k, v = (lax.bitcast_convert_type(x, integer) for x in (k, v))
        kv = with_lanes(jnp.stack([k, v], axis=1), kv_pages.shape[-1])
        return write_planes(kv_pages, kv, slots, interpret=interpret)
    kv = join_heads(k, v, kv_pages.shape)
    flat = kv_pages.reshape(total, *kv_pages.shape[2:])
    return _write_rows(flat, kv, slots, interpret).reshape(kv_pages.shape)


def _write_rows(
    flat: jax.Array, kv: jax.Array, slots: jax.Array, interpret: Any
) -> jax.Array:
    """Flat[slots[t]] = kv[t]."""
    group = _GROUP if flat.shape[0] >= _GROUP else 1
    missing = -kv.shape[0] % group
    kv = jnp.pad(kv, ((0, missing), *[(0, 0)] * (kv.ndim - 1)))
    block = min(_BLOCK, kv.shape[0])
    slots = padded(slots, block)
    live = jnp.sum(slots.reshape(-1, block) >= 0, axis=1, dtype=jnp.int32)
    in_smem = pl.BlockSpec((block,), lambda i: (i,), memory_space=pltpu.SMEM)
    return pl.pallas_call(
        functools.partial(_rows_kernel, block, group),
        grid=(slots.shape[0] // block,),
        in_specs=[
            in_smem,
            in_smem,
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        scratch_shapes=[pltpu.SemaphoreType.DMA],
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="write_kv_rows",
    )(slots, run_lengths(slots, block), live, kv, flat)


def _rows_kernel(
    block: int,
    group: int,
    slots: Any,
    lengths: Any,
    live: Any,
    kv: Any,
    _: Any,
    flat: Any,
    written: Any,
) -> None:
    first = pl.program_id(0) * block

    def copy(token: Any, slot: Any, size: int) -> Any:
        return pltpu.make_async_copy(
            kv.at[pl.ds(token, size)], flat.at[pl.ds(slot, size)], written
        )

    def body(i: Any, carry: Any) -> Any:
        token = i * group
        together = lengths[token] >= group

        @pl.when(together & (slots[token] >= 0))
        def _together() -> None:
            copy(first + token, slots[token], group).start()

        def each(_: Any, carry: Any) -> Any:
            for j in range(group):
                slot = slots[token + j]

                @pl.when(slot >= 0)
                def _one(j: int = j, slot: Any = slot) -> None:
                    copy(first + token + j, slot, 1).start()

            return carry

        # A loop, since a branch's copies are passed through one by one.
        once = jnp.where(together, jnp.int32(0), jnp.int32(1))
        return lax.fori_loop(jnp.int32(0), once, each, carry)

    def wait(size: int, count: Any) -> None:
        def body(_: Any, carry: Any) -> Any:
            copy(0, 0, size).wait()
            return carry

        lax.fori_loop(jnp.int32(0), count, body, jnp.int32(0))

    groups = jnp.int32(block // group)
    lax.fori_loop(jnp.int32(0), groups, body, jnp.int32(0))
    count = live[pl.program_id(0)]
    # A semaphore counts bytes, whatever the copies were.
    wait(group, lax.div(count, jnp.int32(group)))
    wait(1, lax.rem(count, jnp.int32(group)))
