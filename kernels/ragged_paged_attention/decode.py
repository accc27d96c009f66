"""Decode on TPUs: rows of few query tokens against long paged KV.

One loop runs over the blocks of all sequences. A block's pages come by one DMA
each, K and V together, and lie in VMEM as they lie in HBM; fetching runs
`buffers - 1` blocks ahead of computing and crosses from sequence to sequence,
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
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common import exp2_softmax, masking
from pagemill.kernels.common.chip import chip
from pagemill.kernels.common.exp2_softmax import LANES, LN_2, LOG2_E
from pagemill.kernels.common.kv_block import KVBlock, kv_block
from pagemill.kernels.ragged_paged_attention.decode_shape import (
    DecodeShape,
    fit_block_pages,
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
    static = _Static(shape, block, params, tree=tree_mask is not None)
    out, lse = _call(static, tuning, interpret)(
        kv_lens,
        q_lens,
        page_indices,
        num_seqs,
        tree,
        _to_rows(q, shape),
        _columns(shape, params, k_scale, v_scale, sinks),
        block.view(kv_pages),
    )
    return _from_rows(out, shape), _from_rows(lse[..., 0, :, None], shape)[
        ..., 0
    ]


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
        block_pages=fit_block_pages(block, pages_per_seq, tuning),
        cores=chip().cores,
        fp8=chip().takes_fp8,
    )
    return shape, dataclasses.replace(block, pages=shape.block_pages)


def _to_rows(q: jax.Array, shape: DecodeShape) -> jax.Array:
    """[S, queries, Hq, D] to [S, dots, dot_rows, D]."""
    q = q.transpose(0, 2, 1, 3)
    q = q.reshape(shape.seqs, shape.dots, -1, shape.head_dim)
    pad = shape.dot_rows - q.shape[2]
    return jnp.pad(q, ((0, 0), (0, 0), (0, pad), (0, 0))) if pad else q


def _from_rows(rows: jax.Array, shape: DecodeShape) -> jax.Array:
    """[S, dots, dot_rows or more, X] to [S, queries, Hq, X]."""
    live = shape.dot_heads * shape.head_rows
    rows = rows[:, :, :live]
    rows = rows.reshape(
        shape.seqs, shape.num_q_heads, shape.queries, rows.shape[-1]
    )
    return rows.transpose(0, 2, 1, 3)


def _columns(
    shape: DecodeShape,
    params: AttentionParams,
    k_scale: jax.Array | None,
    v_scale: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """f32[3, dots, dot_rows, LANES]: factor on logits and on out, sink.

    Sinks come times log2 e, as the kernel's logits do.
    """
    ones = jnp.ones(shape.num_kv_heads, jnp.float32)
    group = shape.num_q_heads // shape.num_kv_heads
    logit = (
        params.sm_scale
        if params.soft_cap is None
        else (params.sm_scale / params.soft_cap)
    )
    if params.soft_cap is None:
        logit *= LOG2_E
    k_scale = ones if k_scale is None else k_scale
    v_scale = ones if v_scale is None else v_scale
    if sinks is None:
        sinks = jnp.full(shape.num_q_heads, -jnp.inf, jnp.float32)
    columns = jnp.stack(
        [
            jnp.repeat(k_scale.astype(jnp.float32) * np.float32(logit), group),
            jnp.repeat(v_scale.astype(jnp.float32), group),
            sinks.astype(jnp.float32) * np.float32(LOG2_E),
        ]
    )
    columns = jnp.repeat(columns, shape.queries, axis=1)
    columns = columns.reshape(3, shape.dots, -1)
    pad = shape.dot_rows - columns.shape[-1]
    columns = jnp.pad(columns, ((0, 0), (0, 0), (0, pad)))
    return jnp.broadcast_to(columns[..., None], (*columns.shape, LANES))


def _call(static: _Static, tuning: Tuning, interpret: Any) -> Any:
    shape, kv = static.shape, static.block
    cores, steps, seqs = shape.cores, shape.steps, shape.seqs_per_step
    rows, dots = shape.dot_rows, shape.dots
    lse_lanes = -(-rows // LANES) * LANES

    def of_step(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * cores + core, 0, 0, 0

    block = pl.BlockSpec((seqs, dots, rows, shape.head_dim), of_step)
    lse_block = pl.BlockSpec((seqs, dots, 1, lse_lanes), of_step)
    column_block = pl.BlockSpec((3, dots, rows, LANES), lambda *_: (0, 0, 0, 0))
    per_head = (dots, shape.dot_heads, rows, shape.head_dim)
    return pl.pallas_call(
        functools.partial(_kernel, static),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cores, steps),
            in_specs=[
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
                pltpu.SMEM((_STATE_WORDS,), jnp.int32),
                *kv.split_scratch,
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(
                (shape.seqs, dots, rows, shape.head_dim), shape.out_dtype
            ),
            jax.ShapeDtypeStruct((shape.seqs, dots, 1, lse_lanes), jnp.float32),
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


@dataclasses.dataclass(frozen=True)
class _Static:
    shape: DecodeShape
    block: KVBlock
    params: AttentionParams
    tree: bool


# Words of the state in SMEM. The fetching end of the loop: its sequence, its
# next entry of page_indices, pages to come, its buffer. The computing end: its
# buffer.
_FETCH_SEQ, _FETCH_ENTRY, _FETCH_LEFT, _FETCH_BUFFER, _BUFFER = range(5)
_STATE_WORDS = 5
# Copies that a loop starts per iteration; a power of two.
_UNROLL = 8


@dataclasses.dataclass(frozen=True)
class _Refs:
    """The kernel's operands and buffers."""

    kv_lens: Any  # i32[S] SMEM
    q_lens: Any  # i32[S] SMEM
    page_indices: Any  # i32[S * pages_per_seq] SMEM
    num_seqs: Any  # i32[1] SMEM
    tree: Any  # i32[S * queries] SMEM, without a tree mask one word
    q: Any  # [seqs_per_step, dots, dot_rows, D] VMEM
    columns: Any  # f32[3, dots, dot_rows, LANES]: see _columns
    kv_pages: Any  # [N, 2, Hkv, page_size, D] HBM
    out: Any  # as q
    lse: Any  # f32[seqs_per_step, dots, 1, lanes]
    kv: Any  # see KVBlock
    arrived: Any  # DMA semaphore per buffer
    diagonal: Any  # [dots, dot_heads, dot_rows, D], rows of one head each
    highest: Any  # f32[dots, dot_rows, LANES], see exp2_softmax
    total: Any  # f32[dots, dot_rows, LANES]
    acc: Any  # f32[dots, dot_heads, dot_rows, D]; other heads' rows: garbage
    state: Any  # i32[_STATE_WORDS] SMEM
    planes: Any  # see KVBlock
    words: Any


@dataclasses.dataclass(frozen=True)
class _Span:
    """Keys of a sequence that its queries see; scalars."""

    kv_len: Any
    seq: Any
    q_len: Any  # 0 for a dead row
    first_page: Any
    pages: Any  # 0 for a dead row


def _kernel(static: _Static, *refs: Any) -> None:
    r, shape = _Refs(*refs), static.shape
    core, step = pl.program_id(0), pl.program_id(1)
    first = (step * shape.cores + core) * shape.seqs_per_step

    @pl.when(step == 0)
    def _start() -> None:
        _reset(r)
        r.state[_BUFFER] = jnp.int32(0)
        r.state[_FETCH_BUFFER] = jnp.int32(0)
        _seek(static, r, first)
        for _ in range(shape.buffers - 1):
            _fetch(static, r)

    r.out[...] = jnp.zeros(r.out.shape, r.out.dtype)
    r.lse[...] = jnp.full(r.lse.shape, -jnp.inf, r.lse.dtype)
    live = jnp.clip(r.num_seqs[0] - first, 0, shape.seqs_per_step)

    def body(i: Any, carry: Any) -> Any:
        _sequence(static, r, first + i, i)
        return carry

    lax.fori_loop(jnp.int32(0), live, body, jnp.int32(0))


def _span(static: _Static, r: _Refs, seq: Any) -> _Span:
    shape, window = static.shape, static.params.sliding_window
    kv_len, q_len = r.kv_lens[seq], r.q_lens[seq]
    live = (q_len > 0) & (q_len <= shape.queries)
    q_len = jnp.where(live, q_len, 0)
    first_page = jnp.int32(0)
    if window is not None:
        # In this order, nothing overflows, whatever the window.
        begin = jnp.maximum(jnp.maximum(kv_len - q_len, 0) - (window - 1), 0)
        first_page = lax.div(begin, jnp.int32(shape.page_size))
    pages = _ceil_div(kv_len, shape.page_size) - first_page
    pages = jnp.where(live, pages, 0)
    return _Span(kv_len, seq, q_len, first_page, pages)


def _ceil_div(x: Any, by: int) -> Any:
    return lax.div(x + jnp.int32(by - 1), jnp.int32(by))  # int32 in x64 mode


def _seek(static: _Static, r: _Refs, seq: Any) -> None:
    """Points the fetching end at the first live sequence from `seq` on."""
    shape = static.shape
    num_seqs = r.num_seqs[0]

    def following(seq: Any) -> Any:
        seq = seq + 1
        if shape.cores == 1:
            return seq
        # Over the steps of the other cores.
        skip = (shape.cores - 1) * shape.seqs_per_step
        wrap = lax.rem(seq, jnp.int32(shape.seqs_per_step)) == 0
        return jnp.where(wrap, seq + skip, seq)

    def pages(seq: Any) -> Any:
        return _span(static, r, jnp.minimum(seq, shape.seqs - 1)).pages

    seq, left = lax.while_loop(
        lambda c: (c[0] < num_seqs) & (c[1] <= 0),
        lambda c: (following(c[0]), pages(following(c[0]))),
        (seq, pages(seq)),
    )
    safe = jnp.minimum(seq, shape.seqs - 1)
    r.state[_FETCH_SEQ] = seq
    r.state[_FETCH_LEFT] = jnp.where(seq < num_seqs, left, 0)
    r.state[_FETCH_ENTRY] = (
        safe * shape.pages_per_seq + _span(static, r, safe).first_page
    )


def _copy(static: _Static, r: _Refs, buffer: Any, i: Any, page: Any) -> Any:
    """The copy of a page to a block's i-th place."""
    return pltpu.make_async_copy(
        r.kv_pages.at[page],
        static.block.page(r.kv, buffer, i),
        r.arrived.at[buffer],
    )


def _await(static: _Static, r: _Refs, buffer: Any, count: Any) -> None:
    """Waits for `count` pages of a block, one by one.

    One wait for all would do, but the compiler's simulator does not see it:
    kernels would seem faster than HBM.
    """

    def wait(i: Any, carry: Any) -> Any:
        _copy(static, r, buffer, i, 0).wait()
        return carry

    if isinstance(count, int):
        for i in range(count):
            wait(i, None)
    else:
        lax.fori_loop(jnp.int32(0), count, wait, jnp.int32(0))


def _fetch(static: _Static, r: _Refs) -> None:
    """Starts the copies of a block and moves the fetching end behind it."""
    shape = static.shape
    entry, buffer = r.state[_FETCH_ENTRY], r.state[_FETCH_BUFFER]
    count = jnp.minimum(r.state[_FETCH_LEFT], shape.block_pages)

    def start(first: Any, size: int) -> None:
        for i in range(size):
            page = r.page_indices[entry + first + i]
            _copy(static, r, buffer, first + i, page).start()

    def many(i: Any, carry: Any) -> Any:
        start(i * _UNROLL, _UNROLL)
        return carry

    count = jnp.maximum(count, 0)
    groups = lax.div(count, jnp.int32(_UNROLL))
    lax.fori_loop(jnp.int32(0), groups, many, jnp.int32(0))
    done, size = groups * _UNROLL, _UNROLL // 2
    while size:
        pl.when((count & size) != 0)(functools.partial(start, done, size))
        done, size = done + (count & size), size // 2
    _advance(static, r)


def _advance(static: _Static, r: _Refs) -> None:
    shape = static.shape
    left = r.state[_FETCH_LEFT] - shape.block_pages
    r.state[_FETCH_LEFT] = left
    r.state[_FETCH_ENTRY] = r.state[_FETCH_ENTRY] + shape.block_pages
    buffer = r.state[_FETCH_BUFFER] + 1
    r.state[_FETCH_BUFFER] = jnp.where(buffer == shape.buffers, 0, buffer)

    @pl.when((left <= 0) & (left > -shape.block_pages))
    def _next() -> None:
        _seek(static, r, r.state[_FETCH_SEQ] + 1)


def _sequence(static: _Static, r: _Refs, seq: Any, i: Any) -> None:
    """Computes sequence `seq`, the step's i-th."""
    shape, params = static.shape, static.params
    span = _span(static, r, seq)
    _spread_queries(static, r, i)
    # Blocks [low, high) are interior.
    begin = span.first_page * shape.page_size
    end = span.kv_len
    if static.tree:
        end = end - span.q_len
    elif params.causal:
        end = end - span.q_len + 1
    low = jnp.int32(0)
    if params.sliding_window is not None:
        seen = jnp.maximum(span.kv_len - params.sliding_window - begin, 0)
        low = _ceil_div(seen, shape.keys)
    high = lax.div(end - begin, jnp.int32(shape.keys))

    def body(block: Any, carry: Any) -> Any:
        plain = (block >= low) & (block < high)
        fast = plain & (r.state[_FETCH_LEFT] >= shape.block_pages)

        @pl.when(fast)
        def _fast() -> None:
            _interior_block(static, r)

        @pl.when(jnp.logical_not(fast))
        def _slow() -> None:
            _edge_block(static, r, span, block)

        buffer = r.state[_BUFFER] + 1
        r.state[_BUFFER] = jnp.where(buffer == shape.buffers, 0, buffer)
        return carry

    blocks = _ceil_div(span.pages, shape.block_pages)
    lax.fori_loop(jnp.int32(0), blocks, body, jnp.int32(0))
    _finish(static, r, span, i)
    _reset(r)


def _spread_queries(static: _Static, r: _Refs, i: Any) -> None:
    """Lays a sequence's queries out in blocks of a diagonal."""
    shape = static.shape
    for dot in range(shape.dots):
        q = r.q[i, dot].astype(jnp.float32)
        for head in range(shape.dot_heads):
            rows = jnp.where(_rows_of(static, head, q.shape), q, 0.0)
            r.diagonal[dot, head] = rows.astype(shape.dtype)


def _rows_of(static: _Static, head: int, like: tuple[int, ...]) -> Any:
    row = lax.broadcasted_iota(jnp.int32, like, 0)
    rows = static.shape.head_rows
    return (row >= head * rows) & (row < (head + 1) * rows)


def _interior_block(static: _Static, r: _Refs) -> None:
    shape = static.shape
    buffer = r.state[_BUFFER]
    fetched, entry = r.state[_FETCH_BUFFER], r.state[_FETCH_ENTRY]
    _await(static, r, buffer, shape.block_pages)

    def fetch() -> None:
        for i in range(shape.block_pages):
            page = r.page_indices[entry + i]
            _copy(static, r, fetched, i, page).start()

    _attend(static, r, buffer, shape.block_pages, None, fetch)
    _advance(static, r)


def _edge_block(static: _Static, r: _Refs, span: _Span, block: Any) -> None:
    shape = static.shape
    buffer = r.state[_BUFFER]
    _fetch(static, r)
    first = block * shape.block_pages
    count = jnp.minimum(span.pages - first, shape.block_pages)
    _await(static, r, buffer, count)
    begin = (span.first_page + first) * shape.page_size
    below = 0
    for pages in shape.tiers:

        @pl.when((count > below) & (count <= pages))
        def _tier(pages: int = pages) -> None:
            _attend(static, r, buffer, pages, (span, begin), lambda: None)

        below = pages


def _attend(
    static: _Static,
    r: _Refs,
    buffer: Any,
    pages: int,
    edge: Any,
    meanwhile: Any,
) -> None:
    """Adds a block's first pages to the state.

    ``edge`` is None for an interior block, else its span and its first key;
    ``meanwhile`` is called between QK and softmax.
    """
    shape = static.shape
    static.block.split(r.kv, buffer, r.planes, r.words)
    dots = range(shape.dots)
    logits = [_logits(static, r, buffer, pages, dot) for dot in dots]
    # Loads and copies of one buffer keep their order, which idles the MXU;
    # here it would wait for the softmax anyway.
    meanwhile()
    weights, factors = [], []
    for dot in dots:
        x = _scaled(static, r, dot, logits[dot])
        if edge is not None:
            x = jnp.where(_visible(static, r, edge, x.shape), x, -jnp.inf)
        p, new, factor = exp2_softmax.weigh(
            x, r.highest[dot], masked=edge is not None
        )
        r.highest[dot] = new
        r.total[dot] = r.total[dot] * factor + exp2_softmax.spread_sum(p)
        weights.append(p.astype(shape.dtype))
        factors.append(factor)
    for dot in dots:
        _add_values(
            static, r, buffer, pages, dot, weights[dot], factors[dot], edge
        )


def _plane(
    static: _Static, r: _Refs, buffer: Any, pages: int, plane: int, head: int
) -> Any:
    """K (plane 0) or V (1) of a head: [keys, D] in the cache's dtype."""
    return static.block.plane(r.kv, buffer, r.planes, plane, head, pages)


def _logits(
    static: _Static,
    r: _Refs,
    buffer: Any,
    pages: int,
    dot: int,
) -> Any:
    """f32[dot_rows, keys], unscaled."""
    shape = static.shape
    total = None
    for h in range(shape.dot_heads):
        head = dot * shape.dot_heads + h
        k = _operand(static, _plane(static, r, buffer, pages, 0, head))
        product = _matmul(
            static, r.diagonal[dot, h], k, (((1,), (1,)), ((), ()))
        )
        total = product if total is None else total + product
    return total


def _operand(static: _Static, x: Any) -> Any:
    """Keys or values as the MXU takes them; it widens fp8 by itself."""
    fp8 = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    if fp8 and static.shape.fp8 and static.shape.dtype == jnp.bfloat16:
        return x
    return x.astype(static.shape.dtype)


def _matmul(static: _Static, a: Any, b: Any, dimensions: Any) -> Any:
    exact = static.shape.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        dimensions,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _scaled(static: _Static, r: _Refs, dot: int, logits: Any) -> Any:
    """Logits with scale and soft cap, times log2 e."""
    logits = logits * exp2_softmax.widen(r.columns[0, dot], logits.shape[1])
    cap = static.params.soft_cap
    return logits if cap is None else jnp.tanh(logits) * (cap * LOG2_E)


def _visible(
    static: _Static, r: _Refs, edge: Any, like: tuple[int, ...]
) -> Any:
    span, begin = edge
    params, shape = static.params, static.shape
    key = begin + lax.broadcasted_iota(jnp.int32, like, 1)
    seen = key < span.kv_len
    first = span.kv_len - span.q_len
    query = jnp.zeros(like, jnp.int32)
    if shape.queries > 1:
        row = lax.broadcasted_iota(jnp.int32, like, 0)
        query = lax.rem(row, jnp.int32(shape.queries))
    position = first + query
    if static.tree:
        word = jnp.zeros(like, jnp.int32)
        for i in range(shape.queries):
            this = r.tree[span.seq * shape.queries + i]
            word = jnp.where(query == i, this, word)
        seen &= masking.in_tree([word], key - first)
    elif params.causal:
        seen &= key <= position
    if params.sliding_window is not None:
        seen &= position - key < params.sliding_window
    return seen


def _add_values(
    static: _Static,
    r: _Refs,
    buffer: Any,
    pages: int,
    dot: int,
    weights: Any,
    factor: Any,
    edge: Any,
) -> None:
    shape = static.shape
    factor = exp2_softmax.widen(factor, shape.head_dim)
    values = []
    for head in range(shape.dot_heads):
        v = _plane(static, r, buffer, pages, 1, dot * shape.dot_heads + head)
        if edge is not None:
            v = _live_rows(v, edge[0].kv_len - edge[1])
        values.append(_operand(static, v))
    if shape.head_dim % LANES == 0:
        values = [jnp.concatenate(values, axis=1)]
    sums = [
        _matmul(static, weights, v, (((1,), (0,)), ((), ()))) for v in values
    ]
    for head in range(shape.dot_heads):
        if len(sums) == 1:
            at = head * shape.head_dim
            new = sums[0][:, at : at + shape.head_dim]
        else:
            new = sums[head]
        r.acc[dot, head] = r.acc[dot, head] * factor + new


def _live_rows(x: Any, count: Any) -> Any:
    """X [rows, D] with rows from `count` on 0, also where they are NaN."""
    packing = 4 // x.dtype.itemsize
    words = pltpu.bitcast(x, jnp.uint32) if packing > 1 else x
    first = packing * lax.broadcasted_iota(jnp.int32, words.shape, 0)
    if packing == 1:
        return jnp.where(first < count, x, 0)
    live = jnp.clip(count - first, 0, packing)
    bits = live * (32 // packing)
    # A shift by all 32 bits is no shift.
    mask = jnp.where(bits >= 32, -1, (jnp.int32(1) << (bits & 31)) - 1)
    return pltpu.bitcast(words & mask.astype(jnp.uint32), x.dtype)


def _reset(r: _Refs) -> None:
    """The state before a sequence's first key: only the sinks."""
    sinks = r.columns[2]
    lane = lax.broadcasted_iota(jnp.int32, sinks.shape, 2)
    r.highest[...] = sinks
    r.total[...] = jnp.where((lane == 0) & (sinks > -jnp.inf), 1.0, 0.0)
    r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)


def _finish(static: _Static, r: _Refs, span: _Span, i: Any) -> None:
    """Writes the step's i-th sequence."""
    shape = static.shape
    for dot in range(shape.dots):
        total = jnp.sum(r.total[dot], axis=1, keepdims=True)
        total = jnp.broadcast_to(total, r.highest[dot].shape)
        row = lax.broadcasted_iota(jnp.int32, total.shape, 0)
        query = lax.rem(row, jnp.int32(shape.queries))
        some = (total > 0.0) & (query < span.q_len)
        # Dead queries may be NaN, and then so is their accumulator.
        factor = r.columns[1, dot] / jnp.where(some, total, jnp.inf)
        out = jnp.zeros(r.acc.shape[2:], jnp.float32)
        for head in range(shape.dot_heads):
            own = _rows_of(static, head, out.shape)
            out = jnp.where(own, r.acc[dot, head], out)
        factor = exp2_softmax.widen(factor, shape.head_dim)
        out = jnp.where(factor == 0.0, 0.0, out * factor)
        r.out[i, dot] = out.astype(r.out.dtype)
        lse = r.highest[dot] * LN_2 + jnp.log(jnp.where(some, total, 1.0))
        r.lse[i, dot] = _as_row(jnp.where(some, lse, -jnp.inf), r.lse.shape[-1])


def _as_row(column: Any, width: int) -> Any:
    """[rows, LANES] with equal lanes to [1, width], a row per lane."""
    column = exp2_softmax.widen(column, width)
    row = lax.broadcasted_iota(jnp.int32, column.shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, column.shape, 1)
    return jnp.sum(jnp.where(row == lane, column, 0.0), axis=0, keepdims=True)
