"""Prefill's inner loop with scores as [keys, rows].

So the product with V holds the weights in the MXU and fills its columns, 256
on newer TPUs. A block's weights are taken relative to the highest logit of the
blocks *before* it, so that no weight waits for a maximum over its block; sums
are rescaled afterwards. Float32 and bfloat16 bear a logit that is higher by
JUMP. A row with a higher one, and a row whose very first logits are not within
JUMP of 0, is computed again by a safe pass, which takes the maximum first.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from pagemill.kernels.ragged_paged_attention.prefill_state import (
    LN_2,
    Edge,
    Refs,
    Static,
    dot,
    logits,
    masked,
    plane,
    values,
)

# Weights up to 2^JUMP: with 2^20 keys and values up to 2^40, sums stay below
# the float32 limit; weights of a first block are not below 2^-JUMP, all normal.
JUMP = 64.0
_SUBLANES = 8


def state_shape(heads: int, rows: int) -> tuple[int, int, int]:
    return heads, _SUBLANES, rows


def reset(r: Refs) -> None:
    r.top[...] = jnp.full(r.top.shape, -jnp.inf, jnp.float32)
    r.jump[...] = jnp.zeros(r.jump.shape, jnp.float32)
    r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)


def unsafe(r: Refs) -> Any:
    """Bool as `top`: rows to compute again; also where a logit is NaN."""
    return jnp.logical_not(r.jump[...] <= 2.0**JUMP)


def reset_unsafe(r: Refs) -> None:
    again = unsafe(r)
    r.top[...] = jnp.where(again, -jnp.inf, r.top[...])
    r.acc[...] = jnp.where(again[:, :1], 0.0, r.acc[...])


def start_with_sinks(r: Refs, own: Any, *, safe: bool) -> None:
    """Counts a row's sink as if it were a first key, without a value."""
    sinks = jnp.broadcast_to(r.sinks[...], r.top.shape)
    mine = own[None]
    if safe:
        mine = mine & unsafe(r)
    r.top[...] = jnp.where(mine, sinks, r.top[...])
    at = slice(r.acc.shape[1] - _SUBLANES, None)
    one = jnp.where(sinks > -jnp.inf, 1.0, 0.0)
    r.acc[:, at] = jnp.where(mine, one, r.acc[:, at])


def attend(
    static: Static, r: Refs, half: Any, edge: Edge | None, *, safe: bool
) -> None:
    """Adds a block of keys to the state of all rows, or of an edge's own."""
    heads = static.shape.body_heads(1 if safe else 8 if edge is None else 4)

    def body(i: Any, carry: Any) -> Any:
        _heads(static, r, half, [i * heads + h for h in range(heads)], edge,
               safe)
        return carry

    loops = static.shape.num_kv_heads // heads
    if loops == 1:
        body(jnp.int32(0), 0)
    else:
        lax.fori_loop(jnp.int32(0), jnp.int32(loops), body, jnp.int32(0))


def _heads(
    static: Static, r: Refs, half: Any, heads: Any, edge: Any, safe: bool
) -> None:
    """The next head's product with K is issued before this one's weights."""

    def scores(head: Any) -> Any:
        k = plane(static, r, half, 0, head)
        return dot(static, k, r.q[head].astype(k.dtype), (1, 1))

    following = scores(heads[0])
    for i, head in enumerate(heads):
        products = following
        if i + 1 < len(heads):
            following = scores(heads[i + 1])
        x = logits(static, r, head, products)
        v = values(static, r, half, head, edge)
        _update(static, r, head, x, v, edge, safe)


def _update(
    static: Static, r: Refs, head: Any, x: Any, v: Any, edge: Any, safe: bool
) -> None:
    mine, sees = None, True
    if edge is not None:
        mine = edge.own & unsafe_rows(r, head) if safe else edge.own
        x = masked(static, x, edge, jnp.where(mine, edge.end, 0), 0)
    x = x.reshape(-1, _SUBLANES, x.shape[1])
    top = r.top[head]
    if safe:
        new = jnp.maximum(top, _highest(x))
        shift = _finite(new)
    else:
        shift = _finite(top)
    weights = jnp.exp2(x - shift[None]).reshape(-1, x.shape[2])
    weights = weights.astype(v.dtype)
    ones = jnp.ones((32 // v.dtype.itemsize, v.shape[0]), v.dtype)
    sums = dot(static, jnp.concatenate([v.T, ones], axis=0), weights, (1, 0))
    sums = sums[: r.acc.shape[1]]
    if safe:
        acc = r.acc[head] * jnp.exp2(top - shift)[:1] + sums
    else:
        high = _highest(weights)
        rise = jnp.where(top == -jnp.inf, jnp.maximum(high, 1.0 / high), high)
        new = jnp.maximum(top, shift + jnp.log2(high))
        if edge is not None:
            key_end = edge.first_key + static.shape.keys
            some = jnp.maximum(edge.begin, edge.first_key) < jnp.minimum(
                edge.end, key_end
            )
            rise = jnp.where(some, rise, 0.0)
        r.jump[head] = jnp.maximum(r.jump[head], rise)
        acc = (r.acc[head] + sums) * jnp.exp2(shift - _finite(new))[:1]
    if mine is not None:
        # A weight of 0 does not stop a NaN of V: select.
        acc = jnp.where(mine, acc, r.acc[head])
    r.top[head], r.acc[head] = new, acc


def _highest(x: Any) -> Any:
    """The maximum of each column, [_SUBLANES, rows] with equal rows."""
    rows = x.shape[-1]
    x = x.reshape(-1, 32 // x.dtype.itemsize, rows)
    high = jnp.max(x, axis=0).astype(jnp.float32)
    high = jnp.max(high, axis=0, keepdims=True)
    return jnp.broadcast_to(high, (_SUBLANES, rows))


def unsafe_rows(r: Refs, head: Any) -> Any:
    return jnp.logical_not(r.jump[head][:1] <= 2.0**JUMP)


def _finite(x: Any) -> Any:
    return jnp.where(x == -jnp.inf, 0.0, x)


def finish(static: Static, r: Refs, live: Any) -> None:
    """Writes the tile's out and lse; `live` bool[1, rows], others are dead."""
    for head in range(static.shape.num_kv_heads):
        width = static.shape.head_dim
        total = jnp.where(live, r.acc[head, width : width + 1], 0.0)
        some = total != 0.0
        factor = jnp.where(some, 1.0 / jnp.where(some, total, 1.0), 0.0)
        if static.v_scale:
            factor = factor * r.scales[1, head]
        out = jnp.where(some, r.acc[head, :width] * factor, 0.0)
        r.out[head] = out.T.astype(r.out.dtype)
        lse = LN_2 * (r.top[head][:1] + jnp.log2(jnp.where(some, total, 1.0)))
        r.lse[head] = jnp.where(some, lse, -jnp.inf)
