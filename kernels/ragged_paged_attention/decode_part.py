"""A part of a sequence, from its queries to its results."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from pagemill.kernels.common import exp2_softmax
from pagemill.kernels.common.exp2_softmax import LN_2
from pagemill.kernels.ragged_paged_attention import decode_blocks
from pagemill.kernels.ragged_paged_attention.decode_state import (
    BUFFER,
    FETCH_LEFT,
    Refs,
    Span,
    Static,
    ceil_div,
    span_of,
)


def attend(static: Static, r: Refs, part: Any, i: Any) -> None:
    """Computes part `part`, the step's i-th."""
    shape, params = static.shape, static.params
    span = span_of(static, r, part)
    spread_queries(static, r, i)
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
        low = ceil_div(seen, shape.keys)
    high = lax.div(end - begin, jnp.int32(shape.keys))

    def body(block: Any, carry: Any) -> Any:
        plain = (block >= low) & (block < high)
        fast = plain & (r.state[FETCH_LEFT] >= shape.block_pages)

        @pl.when(fast)
        def _fast() -> None:
            decode_blocks.interior_block(static, r)

        @pl.when(jnp.logical_not(fast))
        def _slow() -> None:
            decode_blocks.edge_block(static, r, span, block)

        buffer = r.state[BUFFER] + 1
        r.state[BUFFER] = jnp.where(buffer == shape.buffers, 0, buffer)
        return carry

    blocks = ceil_div(span.pages, shape.block_pages)
    lax.fori_loop(jnp.int32(0), blocks, body, jnp.int32(0))
    finish(static, r, span, i)
    reset(r)


def spread_queries(static: Static, r: Refs, i: Any) -> None:
    """Lays a part's queries out in blocks of a diagonal."""
    shape = static.shape
    for dot in range(shape.dots):
        q = r.q[i, dot].astype(jnp.float32)
        for head in range(shape.dot_heads):
            rows = jnp.where(_rows_of(static, head, q.shape), q, 0.0)
            r.diagonal[dot, head] = rows.astype(shape.dtype)


def _rows_of(static: Static, head: int, like: tuple[int, ...]) -> Any:
    row = lax.broadcasted_iota(jnp.int32, like, 0)
    rows = static.shape.head_rows
    return (row >= head * rows) & (row < (head + 1) * rows)


def reset(r: Refs) -> None:
    """The state before a part's first key: only the sinks."""
    sinks = r.columns[2]
    lane = lax.broadcasted_iota(jnp.int32, sinks.shape, 2)
    r.highest[...] = sinks
    r.total[...] = jnp.where((lane == 0) & (sinks > -jnp.inf), 1.0, 0.0)
    r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)


def finish(static: Static, r: Refs, span: Span, i: Any) -> None:
    """Writes the step's i-th part."""
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
