"""Prefill on TPUs: rows of many query tokens against paged KV.

A grid step owns a tile of query tokens, whichever sequences they belong to. It
walks these sequences and, in each, the blocks of keys that its queries see.
Most blocks are *interior*: the tile is one sequence's and all its queries see
all keys. They run through a loop without masks, which does the work of several
heads interleaved; the others, *edges*, are masked, and rows of other sequences
keep their state to the bit. Both do the same arithmetic on a row, so that it
does not matter to a row which blocks were edges for the sake of its neighbours.

The scores' orientation is chosen by the TPU's MXU: see prefill_columns and
prefill_rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common import masking
from pagemill.kernels.common.exp2_softmax import LOG2_E
from pagemill.kernels.common.kv_block import kv_block
from pagemill.kernels.ragged_paged_attention import (
    prefill_columns,
    prefill_rows,
    prefill_walk,
)
from pagemill.kernels.ragged_paged_attention.prefill_shape import (
    BUFFERS,
    PrefillShape,
    fit,
    fit_table,
)
from pagemill.kernels.ragged_paged_attention.prefill_state import (
    Edge,
    Refs,
    Static,
)
from pagemill.params import AttentionParams, Tuning


def prefill_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    params: AttentionParams,
    tuning: Tuning,
    min_q_len: int = 0,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    columns: bool | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of sequences with any number of query tokens each.

    Args:
      q: [T, Hq, D] f32 or bf16; query i of row s stands at position
        ``kv_lens[s] - q_len + i``; tokens behind the last row's may be NaN.
      kv_pages: of params.kv_layout; f32, bf16, fp8 or int8.
      kv_lens: i32[S], this step's tokens included.
      page_indices: i32[S * pages_per_seq].
      cu_q_lens: i32[S + 1].
      num_seqs: i32[1], rows behind are dead.
      params: what is computed.
      tuning: how it is cut.
      min_q_len: rows with fewer tokens are skipped.
      k_scale: f32[Hkv], factors on K.
      v_scale: f32[Hkv], factors on V.
      sinks: f32[Hq], one more logit per head, in the denominator only.
      tree_mask: u32[T, words], in place of causal: see masking.in_tree.
      columns: the scores' orientation, [keys, rows] or [rows, keys]; None for
        the better one on the TPU that is lowered for.
      interpret: False, or pltpu.InterpretParams to run on a CPU.

    Returns:
      out: as q; 0 for dead and skipped rows and for queries that see no key.
      lse: f32[T, Hq], log-sum-exp of the logits and the sink; -inf where there
        are none, and for dead and skipped rows.
    """
    pages_per_seq = page_indices.shape[0] // kv_lens.shape[0]
    block = kv_block(kv_pages, params, head_dim=q.shape[2])
    shape = fit(q, block, pages_per_seq, tuning, columns=columns)
    block = dataclasses.replace(block, pages=shape.block_pages)
    table = fit_table(page_indices.shape[0], kv_lens.shape[0], shape, tuning)
    static = Static(
        shape,
        block,
        table,
        params,
        min_q_len,
        sinks=sinks is not None,
        k_scale=k_scale is not None,
        v_scale=v_scale is not None,
        tree_words=0 if tree_mask is None else tree_mask.shape[1],
    )
    out, lse = _call(static, interpret)(
        *_sequences_of_tiles(cu_q_lens, num_seqs, shape),
        kv_lens,
        cu_q_lens,
        num_seqs,
        table.operand(page_indices),
        _to_tiles(q, shape),
        _scales(k_scale, v_scale, shape),
        _sinks(sinks, shape),
        _tree(tree_mask, shape),
        block.view(kv_pages),
    )
    return _from_tiles(out, shape), _from_tiles(lse[..., None], shape)[..., 0]


def _sequences_of_tiles(
    cu_q_lens: jax.Array, num_seqs: jax.Array, shape: PrefillShape
) -> tuple[jax.Array, jax.Array]:
    """Sequences [first[i], end[i]) hold the tokens of tile i."""
    rows = cu_q_lens.shape[0] - 1
    live = jnp.clip(num_seqs[0], 0, rows)
    # Rows behind num_seqs may hold anything: they start where all end.
    ends = jnp.where(jnp.arange(rows) < live, cu_q_lens[1:], cu_q_lens[live])
    begin = jnp.arange(shape.tiles, dtype=jnp.int32) * shape.queries
    first = jnp.searchsorted(ends, begin, side="right")
    # The last sequence that starts before the tile's end, and one more.
    end = jnp.searchsorted(ends, begin + shape.queries, side="left") + 1
    first, end = (jnp.minimum(x, live).astype(jnp.int32) for x in (first, end))
    return first, jnp.maximum(first, end)


def _to_tiles(q: jax.Array, shape: PrefillShape) -> jax.Array:
    """[T, Hq, D] to [tiles, Hkv, rows, D]; a tile's rows group-major."""
    padding = shape.tiles * shape.queries - shape.tokens
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    q = q.reshape(shape.tiles, shape.queries, shape.num_q_heads, shape.head_dim)
    q = q.transpose(0, 2, 1, 3)
    return q.reshape(
        shape.tiles, shape.num_kv_heads, shape.rows, shape.head_dim
    )


def _from_tiles(x: jax.Array, shape: PrefillShape) -> jax.Array:
    """[tiles, Hkv, ..., X] of a tile's rows to [T, Hq, X]."""
    width = x.shape[-1]
    x = x.reshape(shape.tiles, shape.num_q_heads, shape.queries, width)
    x = x.transpose(0, 2, 1, 3)
    return x.reshape(-1, shape.num_q_heads, width)[: shape.tokens]


def _scales(
    k_scale: jax.Array | None, v_scale: jax.Array | None, shape: PrefillShape
) -> jax.Array:
    ones = jnp.ones(shape.num_kv_heads, jnp.float32)
    scales = (ones if x is None else x for x in (k_scale, v_scale))
    return jnp.stack([x.astype(jnp.float32) for x in scales])


def _sinks(sinks: jax.Array | None, shape: PrefillShape) -> jax.Array:
    """f32[Hkv, 1, rows], times log2 e; of one row if there are none."""
    if sinks is None:
        return jnp.zeros((shape.num_kv_heads, 1, 1), jnp.float32)
    x = jnp.repeat(sinks.astype(jnp.float32), shape.queries)
    x = x * np.float32(LOG2_E)
    return x.reshape(shape.num_kv_heads, 1, shape.rows)


def _tree(tree_mask: jax.Array | None, shape: PrefillShape) -> jax.Array:
    """i32[tiles, words, 1, rows] by columns, [tiles, words, rows, 1] by rows.

    Without a mask one word per tile that nobody looks at.
    """
    if tree_mask is None:
        return jnp.zeros((shape.tiles, 1, 1, 1), jnp.int32)
    padding = shape.tiles * shape.queries - shape.tokens
    words = lax.bitcast_convert_type(tree_mask, jnp.int32)
    words = jnp.pad(words, ((0, padding), (0, 0)))
    words = words.reshape(shape.tiles, shape.queries, -1).transpose(0, 2, 1)
    words = jnp.tile(words, (1, 1, shape.group))
    return jnp.expand_dims(words, 2 if shape.columns else 3)


def _call(static: Static, interpret: Any) -> Any:
    shape = static.shape
    heads, rows = shape.num_kv_heads, shape.rows

    def of_step(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * shape.cores + core, 0, 0, 0

    block = pl.BlockSpec((None, heads, rows, shape.head_dim), of_step)
    lse_block = pl.BlockSpec((None, heads, 1, rows), of_step)
    sinks = (heads, 1, rows if static.sinks else 1)
    return pl.pallas_call(
        functools.partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5 + static.table.scalar_operands,
            grid=(shape.cores, shape.steps),
            in_specs=[
                *static.table.in_specs,
                block,
                pl.BlockSpec(memory_space=pltpu.SMEM),
                pl.BlockSpec(sinks, lambda *_: (0, 0, 0)),
                pl.BlockSpec((None, *_tree_block(static)), of_step),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[block, lse_block],
            scratch_shapes=_scratch(static),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (shape.tiles, heads, rows, shape.head_dim), shape.out_dtype
            ),
            jax.ShapeDtypeStruct((shape.tiles, heads, 1, rows), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=shape.vmem_limit,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"prefill_attention_{'columns' if shape.columns else 'rows'}"
        f"_q{shape.queries}_p{shape.block_pages}x{shape.page_size}",
    )


def _tree_block(static: Static) -> tuple[int, int, int]:
    rows = static.shape.rows
    if static.tree_words == 0:
        return 1, 1, 1
    layout = (1, rows) if static.shape.columns else (rows, 1)
    return static.tree_words, *layout


def _scratch(static: Static) -> list[Any]:
    shape = static.shape
    heads, rows = shape.num_kv_heads, shape.rows
    way = prefill_columns if shape.columns else prefill_rows
    state = pltpu.VMEM(way.state_shape(heads, rows), jnp.float32)
    unused = pltpu.VMEM((8, 128), jnp.float32)
    acc = (rows, shape.head_dim)
    if shape.columns:
        acc = (shape.head_dim + 8, rows)
    return [
        static.block.buffers(BUFFERS),
        pltpu.SemaphoreType.DMA((BUFFERS,)),
        state,
        unused if shape.columns else state,
        pltpu.VMEM((heads, *acc), jnp.float32),
        state if shape.columns else unused,
        pltpu.SMEM((prefill_walk.WORDS,), jnp.int32),
        *static.block.split_scratch,
        *static.table.scratch,
    ]


def _kernel(static: Static, *refs: Any) -> None:
    r, shape = Refs(*refs), static.shape
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * shape.cores + core

    @pl.when(step == 0)
    def _start() -> None:
        prefill_walk.start(static, r, tile)

    _tile(static, r, tile)


def _tile(static: Static, r: Refs, tile: Any) -> None:
    token = _tokens(static.shape, tile)
    live = token < prefill_walk.num_tokens(r)
    if not static.shape.columns:
        prefill_rows.reset(r)
        _sequences(static, r, tile, safe=False)
        prefill_rows.finish(static, r, live)
        return
    prefill_columns.reset(r)
    _sequences(static, r, tile, safe=False)
    again = live[None] & prefill_columns.unsafe(r)

    @pl.when(jnp.max(again.astype(jnp.float32)) > 0.0)
    def _again() -> None:
        prefill_columns.reset_unsafe(r)
        prefill_walk.restart(static, r, tile)
        _sequences(static, r, tile, safe=True)

    prefill_columns.finish(static, r, live)


def _tokens(shape: PrefillShape, tile: Any) -> Any:
    """The token of each row: i32[1, rows] by columns, [rows, 1] by rows."""
    layout = (1, shape.rows) if shape.columns else (shape.rows, 1)
    row = lax.broadcasted_iota(jnp.int32, layout, 1 if shape.columns else 0)
    return tile * shape.queries + (row & (shape.queries - 1))


def _sequences(static: Static, r: Refs, tile: Any, *, safe: bool) -> None:
    def body(seq: Any, carry: Any) -> Any:
        seen = prefill_walk.span(static, r, tile, seq)

        @pl.when(seen.active)
        def _active() -> None:
            _sequence(static, r, tile, seen, safe=safe)

        return carry

    lax.fori_loop(r.first_seqs[tile], r.end_seqs[tile], body, jnp.int32(0))


def _sequence(
    static: Static,
    r: Refs,
    tile: Any,
    seen: prefill_walk.Span,
    *,
    safe: bool,
) -> None:
    """Attends the blocks of a sequence that the tile's queries see."""
    if static.sinks:
        _start_with_sinks(static, r, tile, seen, safe=safe)
    first, end = seen.blocks(static.shape.keys)
    low, high = seen.interior(static.shape.keys)
    # In the inner loop the next block is of the same sequence.
    high = jnp.minimum(high, end - 1)

    def interior(_: Any, carry: Any) -> Any:
        half = prefill_walk.wait(static, r)
        prefill_walk.fetch_following(static, r, seen)
        _attend(static, r, half, None, safe=False)
        return carry

    def at_edge(block: Any) -> None:
        prefill_walk.fetch(static, r)
        half = prefill_walk.wait(static, r)
        edge = _edge(static, r, tile, seen, block)
        _attend(static, r, half, edge, safe=safe)

    def step(block: Any) -> Any:
        if safe:
            at_edge(block)
            return block + 1
        inside = (block >= low) & (block < high)

        @pl.when(inside)
        def _interior() -> None:
            lax.fori_loop(block, high, interior, jnp.int32(0))
            prefill_walk.fetch_next_sequence(static, r)

        @pl.when(jnp.logical_not(inside))
        def _edge_block() -> None:
            at_edge(block)

        return jnp.where(inside, high, block + 1)

    lax.while_loop(lambda block: block < end, step, first)


def _start_with_sinks(
    static: Static, r: Refs, tile: Any, seen: Any, *, safe: bool
) -> None:
    own = _own(_tokens(static.shape, tile), seen)
    if static.shape.columns:
        prefill_columns.start_with_sinks(r, own, safe=safe)
    else:
        prefill_rows.start_with_sinks(r, own)


def _own(token: Any, seen: prefill_walk.Span) -> Any:
    return (token >= seen.token_begin) & (token < seen.token_end)


def _edge(
    static: Static, r: Refs, tile: Any, seen: prefill_walk.Span, block: Any
) -> Edge:
    token = _tokens(static.shape, tile)
    own = _own(token, seen)
    begin, end = masking.bounds(
        token + seen.offset,
        seen.kv_len,
        static.params,
        tree=static.tree_words > 0,
    )
    return Edge(
        first_key=block * static.shape.keys,
        key_begin=seen.begin,
        key_end=seen.end,
        begin=begin,
        end=jnp.where(own, end, 0),
        own=own,
        first_new=seen.token_begin + seen.offset,
        tree=tuple(r.tree[i] for i in range(static.tree_words)),
    )


def _attend(
    static: Static, r: Refs, half: Any, edge: Edge | None, *, safe: bool
) -> None:
    static.block.split(r.kv, half, r.planes, r.words)
    if static.shape.columns:
        prefill_columns.attend(static, r, half, edge, safe=safe)
    else:
        prefill_rows.attend(static, r, half, edge)
    prefill_walk.done(r)
