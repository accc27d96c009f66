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
from pagemill.kernels.common.exp2_softmax import LN_2
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

# Weights up to 2^JUMP: with 2^20 keys and values up to 2^40, sums stay below
# the float32 limit; weights of a first block are not below 2^-JUMP, all normal.
JUMP = 64.0
_SUBLANES = 8
_KEYS = 256  # of a head, computed together: what the MXU contracts at once
_AHEAD = 2  # parts by which products run ahead of weights
_HEADS, _HEADS_AT_EDGE = 8, 4  # KV heads whose work is interleaved


def state_shape(heads: int, rows: int) -> tuple[int, int, int]:
    """Shape of what is kept per head and row."""
    return heads, _SUBLANES, rows


def reset(r: Refs) -> None:
    """The state of rows that have seen nothing."""
    r.top[...] = jnp.full(r.top.shape, -jnp.inf, jnp.float32)
    r.jump[...] = jnp.zeros(r.jump.shape, jnp.float32)
    r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)


def unsafe(r: Refs) -> Any:
    """Bool as `top`: rows to compute again; also where a logit is NaN."""
    return jnp.logical_not(r.jump[...] <= 2.0**JUMP)


def reset_unsafe(r: Refs) -> None:
    """The same, of the rows to compute again."""
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
    most = 1 if safe else _HEADS if edge is None else _HEADS_AT_EDGE
    heads = static.shape.body_heads(most)

    def body(i: Any, carry: Any) -> Any:
        group = [i * heads + h for h in range(heads)]
        _heads(static, r, half, group, edge, safe=safe)
        return carry

    loops = static.shape.num_kv_heads // heads
    if loops == 1:
        body(jnp.int32(0), 0)
    else:
        lax.fori_loop(jnp.int32(0), jnp.int32(loops), body, jnp.int32(0))


def _heads(
    static: Static, r: Refs, half: Any, heads: Any, edge: Any, *, safe: bool
) -> None:
    """Issues products with K a few parts before their weights are computed."""
    keys = static.shape.keys
    size = _KEYS if keys % _KEYS == 0 else keys
    starts = range(0, keys, size)
    parts = [(head, start) for head in heads for start in starts]

    def scores(head: Any, start: int) -> Any:
        k = plane(static, r, half, 0, head)[start : start + size]
        return dot(static, k, r.q[head].astype(k.dtype), (1, 1))

    ahead = [scores(*part) for part in parts[:_AHEAD]]
    sums: Any = None
    high: Any = None
    for i, (head, start) in enumerate(parts):
        if i + _AHEAD < len(parts):
            ahead.append(scores(*parts[i + _AHEAD]))
        x = logits(static, r, head, ahead.pop(0))
        v = values(static, r, half, head, edge)[start : start + size]
        if safe:
            _update_safely(static, r, head, x, v, edge, start)
            continue
        if edge is not None:
            x = masked(static, x, edge, edge.end, 0, start)
        weights, part_sums = _weigh(static, x, _finite(r.top[head]), v)
        sums = part_sums if start == 0 else sums + part_sums
        part_high = _rows_max(weights)
        high = part_high if start == 0 else jnp.maximum(high, part_high)
        if start == starts[-1]:
            _update(static, r, head, sums, _spread(high), edge)


def _weigh(static: Static, x: Any, shift: Any, v: Any) -> tuple[Any, Any]:
    """Weights 2^(x - shift), and f32[D + 8, rows]: sums with V, then totals."""
    weights = jnp.exp2(x.reshape(-1, _SUBLANES, x.shape[1]) - shift[None])
    weights = weights.reshape(x.shape).astype(v.dtype)
    ones = jnp.ones((32 // v.dtype.itemsize, v.shape[0]), v.dtype)
    v = jnp.concatenate([v.T, ones], axis=0)
    sums = dot(static, v, weights, (1, 0))
    return weights, sums[: static.shape.head_dim + _SUBLANES]


def _update(
    static: Static, r: Refs, head: Any, sums: Any, high: Any, edge: Any
) -> None:
    """Adds a block's sums; `high` is its highest weight, relative to `top`."""
    top = r.top[head]
    rise = jnp.where(top == -jnp.inf, jnp.maximum(high, 1.0 / high), high)
    if edge is not None:
        key_end = edge.first_key + static.shape.keys
        begin = jnp.maximum(edge.begin, edge.first_key)
        rise = jnp.where(begin < jnp.minimum(edge.end, key_end), rise, 0.0)
    r.jump[head] = jnp.maximum(r.jump[head], rise)
    shift = _finite(top)
    new = jnp.maximum(top, shift + jnp.log2(high))
    acc = (r.acc[head] + sums) * jnp.exp2(shift - _finite(new))[:1]
    if edge is not None:
        # A weight of 0 does not stop a NaN of V: select.
        acc = jnp.where(edge.own, acc, r.acc[head])
    r.top[head], r.acc[head] = new, acc


def _update_safely(
    static: Static, r: Refs, head: Any, x: Any, v: Any, edge: Any, start: int
) -> None:
    """The same for unsafe rows, from the maximum of these keys on."""
    mine = edge.own & _unsafe_rows(r, head)
    x = masked(static, x, edge, jnp.where(mine, edge.end, 0), 0, start)
    top = r.top[head]
    new = jnp.maximum(top, _spread(_rows_max(x)))
    shift = _finite(new)
    _, sums = _weigh(static, x, shift, v)
    acc = r.acc[head] * jnp.exp2(top - shift)[:1] + sums
    r.top[head], r.acc[head] = new, jnp.where(mine, acc, r.acc[head])


def _rows_max(x: Any) -> Any:
    """[rows of a register, columns] that hold the maximum of each column."""
    return jnp.max(x.reshape(-1, 32 // x.dtype.itemsize, x.shape[-1]), axis=0)


def _spread(x: Any) -> Any:
    """The maximum of each column, f32[_SUBLANES, columns] with equal rows."""
    high = jnp.max(x.astype(jnp.float32), axis=0, keepdims=True)
    return jnp.broadcast_to(high, (_SUBLANES, x.shape[-1]))


def _unsafe_rows(r: Refs, head: Any) -> Any:
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
