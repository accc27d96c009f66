"""Prefill's inner loop with scores as [rows, keys] and a running maximum.

For TPUs whose MXU is 128 wide: it is full either way, and exp2 and the rest
hide behind it. Lane reductions are rare: the total of a row stays spread over
its lanes until the tile's end.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from pagemill.kernels.common.exp2_softmax import (
    LANES,
    LN_2,
    spread_sum,
    widen,
)
from pagemill.kernels.ragged_paged_attention.prefill_state import (
    Edge,
    Refs,
    Static,
    dot,
    logits,
    masked,
    plane,
    values,
)

_ROWS = 256  # of a head, computed together: few enough not to spill much
_HEADS, _HEADS_AT_EDGE = 8, 2  # KV heads whose work is interleaved


def state_shape(heads: int, rows: int) -> tuple[int, int, int]:
    """Shape of what is kept per head and row."""
    return heads, rows, LANES


def reset(r: Refs) -> None:
    """The state of rows that have seen nothing."""
    r.top[...] = jnp.full(r.top.shape, -jnp.inf, jnp.float32)
    r.total[...] = jnp.zeros(r.total.shape, jnp.float32)
    r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)


def start_with_sinks(r: Refs, own: Any) -> None:
    """Counts a row's sink as if it were a first key, without a value."""
    first = lax.broadcasted_iota(jnp.int32, r.top.shape[1:], 1) == 0
    for head in range(r.top.shape[0]):
        wide = jnp.broadcast_to(r.sinks[head], (LANES, r.sinks.shape[2]))
        sink = wide.T
        r.top[head] = jnp.where(own, sink, r.top[head])
        one = jnp.where(first & (sink > -jnp.inf), 1.0, 0.0)
        r.total[head] = jnp.where(own, one, r.total[head])


def attend(static: Static, r: Refs, half: Any, edge: Edge | None) -> None:
    """Adds a block of keys to the state of all rows, or of an edge's own."""
    heads = static.shape.body_heads(_HEADS if edge is None else _HEADS_AT_EDGE)

    def body(i: Any, carry: Any) -> Any:
        _heads(static, r, half, [i * heads + h for h in range(heads)], edge)
        return carry

    loops = static.shape.num_kv_heads // heads
    if loops == 1:
        body(jnp.int32(0), 0)
    else:
        lax.fori_loop(jnp.int32(0), jnp.int32(loops), body, jnp.int32(0))


def _heads(
    static: Static, r: Refs, half: Any, heads: Any, edge: Edge | None
) -> None:
    """The next part's product with K is issued before this one's softmax."""
    rows = static.shape.rows
    size = _ROWS if rows % _ROWS == 0 else rows
    parts = [
        (head, slice(i, i + size))
        for head in heads
        for i in range(0, rows, size)
    ]

    def scores(head: Any, part: slice) -> Any:
        k = plane(static, r, half, 0, head)
        return dot(static, r.q[head, part].astype(k.dtype), k, (1, 1))

    following = scores(*parts[0])
    for i, (head, part) in enumerate(parts):
        products = following
        if i + 1 < len(parts):
            following = scores(*parts[i + 1])
        x = logits(static, r, head, products)
        v = values(static, r, half, head, edge)
        _update(static, r, (head, part), x, v, edge)


def _update(
    static: Static, r: Refs, at: Any, x: Any, v: Any, edge: Edge | None
) -> None:
    if edge is not None:
        edge = edge.rows(at[1])
        x = masked(static, x, edge, edge.end, 1)
    top = r.top[at]
    peak = jnp.max(x, axis=1, keepdims=True)
    new = jnp.maximum(top, jnp.broadcast_to(peak, top.shape))
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    factor = jnp.exp2(top - shift)
    weights = jnp.exp2(x - widen(shift, x.shape[1]))
    total = r.total[at] * factor + spread_sum(weights)
    sums = dot(static, weights.astype(v.dtype), v, (1, 0))
    acc = r.acc[at] * widen(factor, sums.shape[1]) + sums
    if edge is not None:
        # A weight of 0 does not stop a NaN of V: select.
        acc = jnp.where(edge.own, acc, r.acc[at])
    r.top[at], r.total[at], r.acc[at] = new, total, acc


def finish(static: Static, r: Refs, live: Any) -> None:
    """Writes the tile's out and lse; `live` bool[rows, 1], others are dead."""
    for head in range(static.shape.num_kv_heads):
        total = jnp.sum(r.total[head], axis=1, keepdims=True)
        total = jnp.where(live, total, 0.0)
        some = total != 0.0
        factor = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
        if static.v_scale:
            factor = factor * r.scales[1, head]
        out = jnp.where(some, r.acc[head] * factor, 0.0)
        r.out[head] = out.astype(r.out.dtype)
        lse = LN_2 * (r.top[head] + jnp.log2(jnp.where(some, total, 1.0)))
        r.lse[head] = jnp.where(some, lse, -jnp.inf).T[:1]
