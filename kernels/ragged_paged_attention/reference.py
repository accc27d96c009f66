"""The op in plain jnp: for platforms without a kernel, and to compare with.

Sequence by sequence, in blocks of queries and of keys with an online softmax:
memory is bounded by a block, whatever the batch.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from pagemill.kernels.common import masking, softmax
from pagemill.params import AttentionParams

_KEYS_PER_BLOCK = 256
# Query blocks: decodes would waste most of a large one.
_FEW_QUERIES, _MANY_QUERIES = 8, 128


class _Inputs(NamedTuple):
    q: jax.Array  # padded, so that a slice of queries is never clamped
    kv_pages: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array


def ragged_paged_attention_xla(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    params: AttentionParams,
) -> jax.Array:
    """Attention of every live query token; see the op for the arguments."""
    padding = ((0, _MANY_QUERIES), (0, 0), (0, 0))
    inputs = _Inputs(
        jnp.pad(q, padding), kv_pages, kv_lens, page_indices, cu_q_lens
    )
    few, many = (
        functools.partial(_sequence, inputs, params, size)
        for size in (_FEW_QUERIES, _MANY_QUERIES)
    )

    def sequence(seq: jax.Array, out: jax.Array) -> jax.Array:
        q_len = cu_q_lens[seq + 1] - cu_q_lens[seq]
        return lax.cond(q_len <= _FEW_QUERIES, few, many, seq, out)

    live = jnp.clip(num_seqs[0], 0, page_indices.shape[0])
    out = lax.fori_loop(jnp.int32(0), live, sequence, jnp.zeros_like(inputs.q))
    return out[: q.shape[0]]


def _sequence(
    inputs: _Inputs,
    params: AttentionParams,
    size: int,
    seq: jax.Array,
    out: jax.Array,
) -> jax.Array:
    """Writes one sequence's rows, ``size`` queries at a time."""
    begin = inputs.cu_q_lens[seq]
    q_len = inputs.cu_q_lens[seq + 1] - begin
    first = inputs.kv_lens[seq] - q_len  # position of the first query

    def block(i: jax.Array, out: jax.Array) -> jax.Array:
        row = begin + i * size
        queries = lax.dynamic_slice_in_dim(inputs.q, row, size)
        result = _attend(
            inputs, params, seq, queries, first + i * size, first + q_len - 1
        )
        live = i * size + jnp.arange(size, dtype=jnp.int32) < q_len
        kept = lax.dynamic_slice_in_dim(out, row, size)
        rows = jnp.where(live[:, None, None], result, kept)
        return lax.dynamic_update_slice_in_dim(out, rows, row, 0)

    blocks = (q_len + size - 1) // size
    return lax.fori_loop(jnp.int32(0), blocks, block, out)


def _attend(
    inputs: _Inputs,
    params: AttentionParams,
    seq: jax.Array,
    queries: jax.Array,
    first: jax.Array,
    last: jax.Array,
) -> jax.Array:
    """Queries at positions first, first + 1, ...; those past last are dead."""
    size, num_q_heads, head_dim = queries.shape
    kv_heads = inputs.kv_pages.shape[2] // 2
    shape = (kv_heads, num_q_heads // kv_heads, size)
    grouped = queries.reshape(size, *shape[:2], head_dim)
    positions = first + jnp.arange(size, dtype=jnp.int32)[:, None]
    kv_len = inputs.kv_lens[seq]
    begin, end = masking.visible_range(
        first, jnp.minimum(first + size - 1, last), kv_len, params
    )
    step = _block_pages(inputs) * inputs.kv_pages.shape[1]

    def block(i: jax.Array, state: Any) -> Any:
        highest, total, acc = state
        keys = i * step + jnp.arange(step, dtype=jnp.int32)
        k, v = _gather(inputs, seq, i, (keys >= begin) & (keys < end))
        logits = _dot("nhgd,mhd->hgnm", grouped, k)
        seen = masking.visible(positions, keys[None, :], kv_len, params)
        logits = jnp.where(seen, masking.capped(logits, params), -jnp.inf)
        weights, highest, factor = softmax.weigh(logits, highest)
        total = total * factor + weights.sum(axis=-1, keepdims=True)
        acc = acc * factor + _dot("hgnm,mhd->hgnd", weights.astype(v.dtype), v)
        return highest, total, acc

    # Like the queries, so that under shard_map they vary with them.
    state = (
        jnp.full_like(queries, -jnp.inf, jnp.float32, (*shape, 1)),
        jnp.zeros_like(queries, jnp.float32, (*shape, 1)),
        jnp.zeros_like(queries, jnp.float32, (*shape, head_dim)),
    )
    _, total, acc = lax.fori_loop(
        begin // step, (end + step - 1) // step, block, state
    )
    out = softmax.normalise(acc, total)
    out = jnp.moveaxis(out, 2, 0).reshape(queries.shape)
    return out.astype(queries.dtype)


def _block_pages(inputs: _Inputs) -> int:
    page_size = inputs.kv_pages.shape[1]
    return min(
        max(_KEYS_PER_BLOCK // page_size, 1), inputs.page_indices.shape[1]
    )


def _gather(
    inputs: _Inputs, seq: jax.Array, block: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V of a block; what is not live reads as 0, whatever it holds."""
    pages, page_size = _block_pages(inputs), inputs.kv_pages.shape[1]
    slots = block * pages + jnp.arange(pages, dtype=jnp.int32)
    used = live.reshape(pages, page_size).any(axis=1)
    row = inputs.page_indices[seq]
    ids = row.at[slots].get(mode="clip")
    ids = jnp.where(used, ids, 0)
    kv = inputs.kv_pages.at[ids].get(mode="clip")
    kv = kv.reshape(pages * page_size, *kv.shape[2:])
    kv = jnp.where(live[:, None, None], kv, 0)
    return kv[:, 0::2], kv[:, 1::2]


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation,
        a,
        b,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
