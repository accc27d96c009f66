"""Decode on TPUs: rows of few query tokens against long paged KV.

A sequence's keys may be cut into parts, which are attended side by side and
merged in the end; without that a sequence is one part. The parts are dealt to
the cores in turn.

One loop runs over the blocks of all parts. A block's pages come by one DMA
each, K and V together, and lie in VMEM as they lie in HBM; fetching runs
`buffers - 1` blocks ahead of computing and crosses from part to part,
so that HBM never waits. The rows of several KV heads share a matmul: their
queries stand on the diagonal of a block matrix, [q0 0; 0 q1], and K of these
heads lies side by side, so that logits of all heads fill whole registers. A
block computes every head's QK, then every softmax, then every PV, since each
step alone has a long latency.

Most blocks are *interior*: all their keys are seen by all queries. They are
computed without any mask, and while they are, the next pages are fetched by
straight-line code. The other blocks, at the ends of a sequence, take a slower
path that masks.
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
from pagemill.kernels.common.chip import chip
from pagemill.kernels.common.exp2_softmax import LANES
from pagemill.kernels.common.kv_block import KVBlock, kv_block
from pagemill.kernels.common.merge import merge_states
from pagemill.kernels.ragged_paged_attention import (
    decode_part,
    decode_rows,
    decode_walk,
)
from pagemill.kernels.ragged_paged_attention.decode_shape import (
    DecodeShape,
    fit_block_pages,
    fit_splits,
    fit_table,
)
from pagemill.kernels.ragged_paged_attention.decode_state import (
    BUFFER,
    FETCH_BUFFER,
    STATE_WORDS,
    Refs,
    Static,
    ceil_div,
)
from pagemill.params import AttentionParams, Tuning


def decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    q_lens: jax.Array,
    page_indices: jax.Array,
    num_seqs: jax.Array,
    *,
    params: AttentionParams,
    tuning: Tuning,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    sinks: jax.Array | None = None,
    tree_mask: jax.Array | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention of sequences with few query tokens each.

    Args:
      q: [S, queries, Hq, D] f32 or bf16; query i of row s stands at position
        ``kv_lens[s] - q_lens[s] + i``; those from ``q_lens[s]`` on are dead.
      kv_pages: of params.kv_layout; f32, bf16, fp8 or int8.
      kv_lens: i32[S], this step's tokens included.
      q_lens: i32[S]; rows with 0, or more than ``queries``, are skipped.
      page_indices: i32[S * pages_per_seq].
      num_seqs: i32[1], rows behind are dead.
      params: what is computed.
      tuning: how it is cut.
      k_scale: f32[Hkv], factors on K.
      v_scale: f32[Hkv], factors on V.
      sinks: f32[Hq], one more logit per head, in the denominator only.
      tree_mask: u32[S, queries], in place of causal: bit j says whether a query
        sees its row's j-th token of this step.
      interpret: False, or pltpu.InterpretParams to run on a CPU.

    Returns:
      out: as q; 0 for dead rows and for queries that see no key.
      lse: f32[S, queries, Hq], log-sum-exp of the logits and the sink; -inf
        where there are none.
    """
    shape, block = _shape(q, kv_pages, page_indices, params, tuning)
    if tree_mask is None:
        tree = jnp.zeros((1,), jnp.int32)
    else:
        tree = lax.bitcast_convert_type(tree_mask, jnp.int32).reshape(-1)
    table = fit_table(
        page_indices.shape[0],
        shape.seqs,
        tree.shape[0],
        block_pages=shape.block_pages,
        tuning=tuning,
    )
    static = Static(shape, block, table, params, tree=tree_mask is not None)
    split = shape.splits > 1
    out, lse = _call(static, tuning, interpret)(
        kv_lens,
        q_lens,
        num_seqs,
        tree,
        table.operand(page_indices),
        decode_rows.to_rows(q, shape),
        decode_rows.columns(
            shape, params, k_scale, v_scale, None if split else sinks
        ),
        block.view(kv_pages),
    )
    out = decode_rows.from_rows(out, shape)
    lse = decode_rows.from_rows(lse[..., 0, :, None], shape)[..., 0]
    if not split:
        return out[0], lse[0]
    if sinks is not None:
        live = jnp.arange(shape.seqs) < num_seqs[0]
        out, lse = _with_sinks(out, lse, sinks, jnp.where(live, q_lens, 0))
    out, lse = merge_states(out, lse)
    return out.astype(q.dtype), lse


def _with_sinks(
    out: jax.Array, lse: jax.Array, sinks: jax.Array, q_lens: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sinks as one more part, of no value."""
    queries = lse.shape[2]
    q_lens = jnp.where(q_lens <= queries, q_lens, 0)
    live = jnp.arange(queries) < q_lens[:, None]
    sink = jnp.where(live[..., None], sinks.astype(jnp.float32), -jnp.inf)
    return (
        jnp.concatenate([out, jnp.zeros_like(out[:1])]),
        jnp.concatenate([lse, sink[None]]),
    )


def _shape(
    q: jax.Array,
    kv_pages: jax.Array,
    page_indices: jax.Array,
    params: AttentionParams,
    tuning: Tuning,
) -> tuple[DecodeShape, KVBlock]:
    seqs, queries, num_q_heads, head_dim = q.shape
    block = kv_block(kv_pages, params, head_dim=head_dim)
    pages_per_seq = page_indices.shape[0] // seqs
    pages = fit_block_pages(block, pages_per_seq, tuning)
    block, cores = dataclasses.replace(block, pages=pages), chip().cores
    shape = DecodeShape(
        seqs=seqs,
        queries=queries,
        num_q_heads=num_q_heads,
        num_kv_heads=block.heads,
        head_dim=head_dim,
        page_size=block.page_size,
        pages_per_seq=pages_per_seq,
        kv_dtype=block.dtype,
        out_dtype=jnp.dtype(q.dtype),
        block_pages=block.pages,
        cores=cores,
        splits=fit_splits(block, seqs, pages_per_seq, cores, tuning),
        fp8=chip().takes_fp8,
    )
    return shape, block


def _call(static: Static, tuning: Tuning, interpret: Any) -> Any:
    shape, kv = static.shape, static.block
    cores, parts = shape.cores, shape.parts_per_step
    rows, dots = shape.dot_rows, shape.dots
    lse_lanes = -(-rows // LANES) * LANES

    def of_step(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return core, step, 0, 0, 0

    block = pl.BlockSpec((None, parts, dots, rows, shape.head_dim), of_step)
    lse_block = pl.BlockSpec((None, parts, dots, 1, lse_lanes), of_step)
    of_cores = (cores, shape.parts_per_core, dots)
    column_block = pl.BlockSpec((3, dots, rows, LANES), lambda *_: (0, 0, 0, 0))
    per_head = (dots, shape.dot_heads, rows, shape.head_dim)
    return pl.pallas_call(
        functools.partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4 + static.table.scalar_operands,
            grid=(cores, shape.steps),
            in_specs=[
                *static.table.in_specs,
                block,
                column_block,
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=[block, lse_block],
            scratch_shapes=[
                kv.buffers(shape.buffers),
                pltpu.SemaphoreType.DMA((shape.buffers,)),
                pltpu.VMEM(per_head, shape.dtype),
                pltpu.VMEM((dots, rows, LANES), jnp.float32),
                pltpu.VMEM((dots, rows, LANES), jnp.float32),
                pltpu.VMEM(per_head, jnp.float32),
                pltpu.SMEM((STATE_WORDS,), jnp.int32),
                *kv.split_scratch,
                *static.table.scratch,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (*of_cores, rows, shape.head_dim), shape.result_dtype
            ),
            jax.ShapeDtypeStruct((*of_cores, 1, lse_lanes), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=tuning.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"decode_attention_q{shape.queries}_p{shape.block_pages}"
        f"x{shape.page_size}",
    )


def _kernel(static: Static, *refs: Any) -> None:
    r, shape = Refs(*refs), static.shape
    core, step = pl.program_id(0), pl.program_id(1)
    # The step's i-th part is the core's (before + i)-th.
    before = step * shape.parts_per_step
    parts = r.num_seqs[0] * shape.splits

    @pl.when(step == 0)
    def _start() -> None:
        decode_part.reset(r)
        r.state[BUFFER] = jnp.int32(0)
        r.state[FETCH_BUFFER] = jnp.int32(0)
        decode_walk.seek(static, r, core)
        for _ in range(shape.buffers - 1):
            decode_walk.fetch(static, r)

    r.out[...] = jnp.zeros(r.out.shape, r.out.dtype)
    r.lse[...] = jnp.full(r.lse.shape, -jnp.inf, r.lse.dtype)
    mine = ceil_div(jnp.maximum(parts - core, 0), shape.cores)
    live = jnp.clip(mine - before, 0, shape.parts_per_step)

    def body(i: Any, carry: Any) -> Any:
        part = (before + i) * shape.cores + core
        decode_part.attend(static, r, part, i)
        return carry

    lax.fori_loop(jnp.int32(0), live, body, jnp.int32(0))
