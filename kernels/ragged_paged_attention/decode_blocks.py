"""A block of keys and values added to a sequence's state."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common import exp2_softmax, masking
from pagemill.kernels.common.exp2_softmax import LANES, LOG2_E
from pagemill.kernels.ragged_paged_attention import decode_walk
from pagemill.kernels.ragged_paged_attention.decode_state import (
    BUFFER,
    Refs,
    Span,
    Static,
)


def interior_block(static: Static, r: Refs) -> None:
    """Adds a whole block that all queries see, and fetches another."""
    pages, buffer = static.shape.block_pages, r.state[BUFFER]
    fetch = decode_walk.fetch_later(static, r)
    if static.table.streamed:  # the next window comes meanwhile
        decode_walk.advance(static, r)
    decode_walk.wait(static, r, buffer, pages)
    _attend(static, r, buffer, pages, None, fetch)
    if not static.table.streamed:
        decode_walk.advance(static, r)


def edge_block(static: Static, r: Refs, span: Span, block: Any) -> None:
    """Adds the `block`-th block of a sequence, masked."""
    shape = static.shape
    buffer = r.state[BUFFER]
    decode_walk.fetch(static, r)
    first = block * shape.block_pages
    count = jnp.minimum(span.pages - first, shape.block_pages)
    decode_walk.wait(static, r, buffer, count)
    begin = (span.first_page + first) * shape.page_size
    below = 0
    for pages in shape.tiers:

        @pl.when((count > below) & (count <= pages))
        def _tier(pages: int = pages) -> None:
            _attend(static, r, buffer, pages, (span, begin), lambda: None)

        below = pages


def _attend(
    static: Static,
    r: Refs,
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
    static: Static, r: Refs, buffer: Any, pages: int, plane: int, head: int
) -> Any:
    """K (plane 0) or V (1) of a head: [keys, D] in the cache's dtype."""
    return static.block.plane(r.kv, buffer, r.planes, plane, head, pages)


def _logits(
    static: Static,
    r: Refs,
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


def _operand(static: Static, x: Any) -> Any:
    """Keys or values as the MXU takes them; it widens fp8 by itself."""
    fp8 = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize == 1
    if fp8 and static.shape.fp8 and static.shape.dtype == jnp.bfloat16:
        return x
    return x.astype(static.shape.dtype)


def _matmul(static: Static, a: Any, b: Any, dimensions: Any) -> Any:
    exact = static.shape.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        dimensions,
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _scaled(static: Static, r: Refs, dot: int, logits: Any) -> Any:
    """Logits with scale and soft cap, times log2 e."""
    logits = logits * exp2_softmax.widen(r.columns[0, dot], logits.shape[1])
    cap = static.params.soft_cap
    return logits if cap is None else jnp.tanh(logits) * (cap * LOG2_E)


def _visible(static: Static, r: Refs, edge: Any, like: tuple[int, ...]) -> Any:
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
    static: Static,
    r: Refs,
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
    if x.shape[0] % packing:  # a tiny block: no whole words
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        wide = jnp.where(row < count, x.astype(jnp.float32), 0.0)
        return wide.astype(x.dtype)
    words = pltpu.bitcast(x, jnp.uint32) if packing > 1 else x
    first = packing * lax.broadcasted_iota(jnp.int32, words.shape, 0)
    if packing == 1:
        return jnp.where(first < count, x, 0)
    live = jnp.clip(count - first, 0, packing)
    bits = live * (32 // packing)
    # A shift by all 32 bits is no shift.
    mask = jnp.where(bits >= 32, -1, (jnp.int32(1) << (bits & 31)) - 1)
    return pltpu.bitcast(words & mask.astype(jnp.uint32), x.dtype)
