"""The op on TPUs: a Pallas kernel over blocks of query tokens.

A grid step owns a block of query tokens, whichever sequences they belong to.
It walks these sequences and, in each, the blocks of keys that its queries see;
a block's live pages come by one DMA each into one half of a double buffer,
while the block before is computed from the other half. Rows of a block that
belong to another sequence are masked: their state does not change by one bit.

Pages arrive as they lie in HBM, [page_size * 2 * num_kv_heads, head_dim], with
K and V of a head in adjacent rows. For 16-bit types two such rows share a row
of 32-bit words, K in the low half: a word's halves, widened to float32, are K
and V exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common import masking, softmax
from pagemill.kernels.ragged_paged_attention import tuning as tuning_lib
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kernels.ragged_paged_attention.tuning import (
    LANES,
    BlockSizes,
    KernelShape,
)
from pagemill.params import AttentionParams, Tuning


def ragged_paged_attention_tpu(
    operands: Operands,
    *,
    params: AttentionParams,
    tuning: Tuning,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Attention of every live query token; see the op for the arguments.

    ``interpret`` is False, or pltpu.InterpretParams to run on a CPU.
    """
    q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, *_ = operands
    num_tokens, num_q_heads, head_dim = q.shape
    total_num_pages, page_size, combined, _ = kv_pages.shape
    shape = KernelShape(
        max_num_tokens=num_tokens,
        pages_per_seq=page_indices.shape[1],
        page_size=page_size,
        num_q_heads=num_q_heads,
        num_kv_heads=combined // 2,
        head_dim=head_dim,
        dtype=q.dtype,
    )
    blocks = tuning_lib.fit(shape, tuning)
    grid = -(-num_tokens // blocks.queries)
    out = _call(shape, blocks, grid, params, tuning, interpret)(
        *_sequences_of_blocks(cu_q_lens, num_seqs, grid, blocks.queries),
        kv_lens,
        page_indices.reshape(-1),
        cu_q_lens,
        _to_blocks(q, shape, blocks, grid),
        kv_pages.reshape(total_num_pages, page_size * combined, head_dim),
    )
    return (_from_blocks(out, shape, blocks, grid),)


def _call(
    shape: KernelShape,
    blocks: BlockSizes,
    grid: int,
    params: AttentionParams,
    tuning: Tuning,
    interpret: Any,
) -> Any:
    heads, keys = shape.num_kv_heads, blocks.pages * shape.page_size
    rows = blocks.queries * shape.num_q_heads // heads
    block = pl.BlockSpec(
        (heads, None, rows, shape.head_dim), lambda i, *_: (0, i, 0, 0)
    )
    words = tuning_lib.words_shape(shape, blocks)
    return pl.pallas_call(
        functools.partial(_kernel, _Static(shape, blocks, params)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(grid,),
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[
                pltpu.VMEM((2, keys * 2 * heads, shape.head_dim), shape.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, LANES), jnp.float32),
                pltpu.VMEM((heads, rows, shape.head_dim), jnp.float32),
                *([] if words is None else [pltpu.VMEM(words, jnp.uint32)]),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(
            (heads, grid, rows, shape.head_dim), shape.dtype
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=tuning.vmem_limit_bytes,
        ),
        interpret=interpret,
        name=f"ragged_paged_attention_q{blocks.queries}_p{blocks.pages}"
        f"x{shape.page_size}",
    )


def _sequences_of_blocks(
    cu_q_lens: jax.Array, num_seqs: jax.Array, grid: int, queries: int
) -> tuple[jax.Array, jax.Array]:
    """Sequences [first[i], end[i]) hold the tokens of query block i."""
    rows = cu_q_lens.shape[0] - 1
    live = jnp.clip(num_seqs[0], 0, rows)
    # Rows behind num_seqs may hold anything: they start where all end.
    ends = jnp.where(jnp.arange(rows) < live, cu_q_lens[1:], cu_q_lens[live])
    begin = jnp.arange(grid, dtype=jnp.int32) * queries
    first = jnp.searchsorted(ends, begin, side="right")
    # The last sequence that starts before the block's end, and one more.
    end = jnp.searchsorted(ends, begin + queries, side="left") + 1
    first, end = (jnp.minimum(x, live).astype(jnp.int32) for x in (first, end))
    return first, jnp.maximum(first, end)


def _to_blocks(
    q: jax.Array, shape: KernelShape, blocks: BlockSizes, grid: int
) -> jax.Array:
    """[T, Hq, D] to [Hkv, grid, G * queries, D]; a block's rows group-major."""
    heads, group = shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads
    q = jnp.pad(q, ((0, grid * blocks.queries - q.shape[0]), (0, 0), (0, 0)))
    q = q.reshape(grid, blocks.queries, heads, group, shape.head_dim)
    q = q.transpose(2, 0, 3, 1, 4)
    return q.reshape(heads, grid, group * blocks.queries, shape.head_dim)


def _from_blocks(
    out: jax.Array, shape: KernelShape, blocks: BlockSizes, grid: int
) -> jax.Array:
    heads, group = shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads
    out = out.reshape(heads, grid, group, blocks.queries, shape.head_dim)
    out = out.transpose(1, 3, 0, 2, 4)
    out = out.reshape(-1, shape.num_q_heads, shape.head_dim)
    return out[: shape.max_num_tokens]


@dataclasses.dataclass(frozen=True)
class _Static:
    shape: KernelShape
    blocks: BlockSizes
    params: AttentionParams

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.blocks.pages * self.shape.page_size


@dataclasses.dataclass(frozen=True)
class _Refs:
    """The kernel's operands and buffers."""

    first_seqs: Any  # i32[grid] SMEM, as all until q
    end_seqs: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    q: Any  # [Hkv, rows, D] VMEM
    kv_pages: Any  # [N, page_size * 2 * Hkv, D] HBM
    out: Any  # as q
    kv: Any  # [2, keys * 2 * Hkv, D]
    arrived: Any  # DMA semaphore per half of kv
    highest: Any  # f32[Hkv, rows, LANES], lanes equal
    total: Any  # f32[Hkv, rows, LANES], lanes equal
    acc: Any  # f32[Hkv, rows, D]
    words: Any = None  # u32, see tuning.words_shape


@dataclasses.dataclass(frozen=True)
class _Span:
    """What a query block sees of a sequence; scalars."""

    offset: Any  # position of a query minus its token
    token_begin: Any  # the sequence's tokens
    token_end: Any
    kv_len: Any
    begin: Any  # keys that any query of the block sees
    end: Any


def _kernel(static: _Static, *refs: Any) -> None:
    r = _Refs(*refs)
    r.highest[...] = jnp.full(r.highest.shape, -jnp.inf, jnp.float32)
    r.total[...] = jnp.zeros(r.total.shape, jnp.float32)
    r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)
    end_seq = r.end_seqs[pl.program_id(0)]
    first_seq = r.first_seqs[pl.program_id(0)]

    @pl.when(first_seq < end_seq)
    def _walk() -> None:
        first_block = _first_block(static, _span(static, r, first_seq))
        _fetch(static, r, first_seq, first_block, jnp.int32(0), start=True)
        lax.while_loop(
            lambda state: state[0] < end_seq,
            functools.partial(_step, static, r, end_seq),
            (first_seq, first_block, jnp.int32(0)),
        )

    for head in range(static.shape.num_kv_heads):
        out = softmax.normalise(r.acc[head], r.total[head, :, :1])
        r.out[head] = out.astype(r.out.dtype)


def _step(static: _Static, r: _Refs, end_seq: Any, state: Any) -> Any:
    """Computes block `block` of `seq` while the next one is on its way."""
    seq, block, half = state
    span = _span(static, r, seq)
    last = block + 1 >= _ceil_div(span.end, static.keys)
    next_seq = jnp.where(last, seq + 1, seq)
    # Past the last sequence nothing is fetched; any valid row will do.
    peek = jnp.minimum(next_seq, end_seq - 1)
    next_block = jnp.where(
        last, _first_block(static, _span(static, r, peek)), block + 1
    )

    @pl.when(next_seq < end_seq)
    def _prefetch() -> None:
        _fetch(static, r, next_seq, next_block, 1 - half, start=True)

    _fetch(static, r, seq, block, half, start=False)
    _attend(static, r, span, block, half)
    return next_seq, next_block, 1 - half


def _span(static: _Static, r: _Refs, seq: Any) -> _Span:
    queries = static.blocks.queries
    block_begin = pl.program_id(0) * queries
    token_begin, token_end = r.cu_q_lens[seq], r.cu_q_lens[seq + 1]
    kv_len = r.kv_lens[seq]
    offset = kv_len - token_end
    begin, end = masking.visible_range(
        jnp.maximum(block_begin, token_begin) + offset,
        jnp.minimum(block_begin + queries, token_end) - 1 + offset,
        kv_len,
        static.params,
    )
    return _Span(offset, token_begin, token_end, kv_len, begin, end)


def _first_block(static: _Static, span: _Span) -> Any:
    return lax.div(span.begin, jnp.int32(static.keys))


def _ceil_div(x: Any, by: int) -> Any:
    return lax.div(x + jnp.int32(by - 1), jnp.int32(by))  # int32 in x64 mode


def _fetch(
    static: _Static, r: _Refs, seq: Any, block: Any, half: Any, *, start: bool
) -> None:
    """Starts, or waits for, the copies of a block's live pages."""
    page_size, pages = static.shape.page_size, static.blocks.pages
    rows = page_size * 2 * static.shape.num_kv_heads
    span = _span(static, r, seq)
    first_slot = block * pages
    low = lax.div(span.begin, jnp.int32(page_size)) - first_slot
    high = _ceil_div(span.end, page_size) - first_slot

    def copy(i: Any, carry: Any) -> Any:
        slot = seq * static.shape.pages_per_seq + first_slot + i
        target = r.kv.at[half, pl.ds(pl.multiple_of(i * rows, rows), rows)]
        source = r.kv_pages.at[r.page_indices[slot]]
        dma = pltpu.make_async_copy(source, target, r.arrived.at[half])
        if start:
            dma.start()
        else:
            dma.wait()
        return carry

    lax.fori_loop(
        jnp.clip(low, 0, pages), jnp.clip(high, 0, pages), copy, jnp.int32(0)
    )


def _attend(
    static: _Static, r: _Refs, span: _Span, block: Any, half: Any
) -> None:
    """Adds a block of keys to the state of the sequence's rows."""
    rows = r.q.shape[1]
    key = block * static.keys + lax.broadcasted_iota(
        jnp.int32, (rows, static.keys), 1
    )
    token = _tokens(static, key.shape)
    seen = masking.visible(token + span.offset, key, span.kv_len, static.params)
    seen &= _owned(span, token)
    own = _owned(span, _tokens(static, r.acc.shape[1:]))
    fetched = block * static.keys + lax.broadcasted_iota(
        jnp.int32, (static.keys, static.shape.head_dim), 0
    )
    fetched = (fetched >= span.begin) & (fetched < span.end)
    if r.words is not None:
        words = pltpu.bitcast(r.kv[half], jnp.uint32)
        width = r.words.shape[-1]
        for i in range(r.words.shape[0]):
            r.words[i] = words[:, i * width : (i + 1) * width]
    for head in range(static.shape.num_kv_heads):
        k, v = _keys_and_values(static, r, half, head)
        _update(static, r, head, k, jnp.where(fetched, v, 0), seen, own)


def _tokens(static: _Static, shape: tuple[int, ...]) -> Any:
    """The token of each row; rows are group-major, queries a power of two."""
    queries = static.blocks.queries
    row = lax.broadcasted_iota(jnp.int32, shape, 0)
    return pl.program_id(0) * queries + (row & (queries - 1))


def _owned(span: _Span, token: Any) -> Any:
    return (token >= span.token_begin) & (token < span.token_end)


def _keys_and_values(
    static: _Static, r: _Refs, half: Any, head: int
) -> tuple[Any, Any]:
    """[keys, D] each, of one KV head."""
    heads, keys = static.shape.num_kv_heads, static.keys
    if r.words is None:
        k = r.kv[half, pl.ds(2 * head, keys, 2 * heads)]
        return k, r.kv[half, pl.ds(2 * head + 1, keys, 2 * heads)]
    if r.kv.dtype.itemsize == 4:
        k = _strided(r.words, 2 * head, keys, 2 * heads)
        v = _strided(r.words, 2 * head + 1, keys, 2 * heads)
        return pltpu.bitcast(k, r.kv.dtype), pltpu.bitcast(v, r.kv.dtype)
    words = _strided(r.words, head, keys, heads)
    low = pltpu.bitcast(words << 16, jnp.float32)
    high = pltpu.bitcast(words & jnp.uint32(0xFFFF0000), jnp.float32)
    return low.astype(r.kv.dtype), high.astype(r.kv.dtype)


def _strided(words: Any, start: int, size: int, stride: int) -> Any:
    parts = [
        words[i, pl.ds(start, size, stride)] for i in range(words.shape[0])
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def _update(
    static: _Static, r: _Refs, head: int, k: Any, v: Any, seen: Any, own: Any
) -> None:
    highest, total = r.highest[head, :, :1], r.total[head, :, :1]
    logits = masking.capped(_dot(r.q[head], k, 1), static.params)
    weights, new, factor = softmax.weigh(
        jnp.where(seen, logits, -jnp.inf), highest
    )
    total = total * factor + jnp.sum(weights, axis=-1, keepdims=True)
    r.highest[head] = jnp.broadcast_to(new, r.highest.shape[1:])
    r.total[head] = jnp.broadcast_to(total, r.total.shape[1:])
    acc = r.acc[head] * factor + _dot(weights.astype(v.dtype), v, 0)
    # A weight of 0 does not stop a NaN of V: select, so that one sequence's
    # broken values never reach the rows of another.
    r.acc[head] = jnp.where(own, acc, r.acc[head])


def _dot(a: Any, b: Any, contracting: int) -> Any:
    """A's last axis against one of b's, summed in float32."""
    exact = a.dtype == jnp.float32  # The default would round to bfloat16.
    return lax.dot_general(
        a,
        b,
        (((1,), (contracting,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else None,
    )
