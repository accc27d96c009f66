"""Queries as the decode kernel takes them, and its results back.

A sequence's rows of a KV head are group-major; the heads of a matmul follow
each other, and padding ends it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from pagemill.kernels.common.exp2_softmax import LANES, LOG2_E
from pagemill.kernels.ragged_paged_attention.decode_shape import DecodeShape
from pagemill.params import AttentionParams


def to_rows(q: jax.Array, shape: DecodeShape) -> jax.Array:
    """[S, queries, Hq, D] to [cores, parts_per_core, dots, dot_rows, D]."""
    q = q.transpose(0, 2, 1, 3)
    q = q.reshape(shape.seqs, shape.dots, -1, shape.head_dim)
    q = jnp.repeat(q, shape.splits, axis=0)
    more = shape.parts_per_core * shape.cores - shape.parts
    pad = shape.dot_rows - q.shape[2]
    q = jnp.pad(q, ((0, more), (0, 0), (0, pad), (0, 0)))
    # A core's own lie one behind the other: each step's are one plain copy.
    return q.reshape(-1, shape.cores, *q.shape[1:]).swapaxes(0, 1)


def from_rows(rows: jax.Array, shape: DecodeShape) -> jax.Array:
    """[cores, parts_per_core, dots, dot_rows or more, X], parts apart.

    Returns:
      [splits, S, queries, Hq, X].
    """
    live = shape.dot_heads * shape.head_rows
    rows = rows.swapaxes(0, 1).reshape(-1, *rows.shape[2:])
    rows = rows[: shape.parts, :, :live]
    rows = rows.reshape(
        shape.seqs,
        shape.splits,
        shape.num_q_heads,
        shape.queries,
        rows.shape[-1],
    )
    return rows.transpose(1, 0, 3, 2, 4)


def columns(
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
