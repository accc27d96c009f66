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
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kv_cache import page_size_of, split_heads
from pagemill.params import AttentionParams

_KEYS_PER_BLOCK = 256
# Query blocks: decodes would waste most of a large one.
_FEW_QUERIES, _MANY_QUERIES = 8, 128


class _Inputs(NamedTuple):
    o: Operands  # q padded, so that a slice of queries is never clamped
    params: AttentionParams
    page_size: int

    @property
    def kv_heads(self) -> int:
        heads = self.params.num_kv_heads
        assert heads is not None  # The op fills it in.
        return heads

    @property
    def block_pages(self) -> int:
        """Pages whose keys are looked at together."""
        pages = max(_KEYS_PER_BLOCK // self.page_size, 1)
        return min(pages, int(self.o.page_indices.shape[1]))


class _Queries(NamedTuple):
    """Some of a sequence's queries, at positions first, first + 1, ..."""

    q: jax.Array  # [size, Hq, D]
    tree: jax.Array | None  # u32[size, W]
    first: jax.Array
    last: jax.Array  # position of the sequence's last; those past it are dead


def ragged_paged_attention_xla(
    operands: Operands, *, params: AttentionParams
) -> tuple[jax.Array, ...]:
    """Attention of every live query token; see the op for the arguments."""
    inputs = _Inputs(
        operands._replace(
            q=_padded(operands.q),
            tree_mask=None
            if operands.tree_mask is None
            else _padded(operands.tree_mask),
        ),
        params,
        page_size_of(operands.kv_pages, params.kv_layout),
    )
    few, many = (
        functools.partial(_sequence, inputs, size)
        for size in (_FEW_QUERIES, _MANY_QUERIES)
    )
    cu_q_lens = operands.cu_q_lens

    def sequence(seq: jax.Array, outs: Any) -> Any:
        q_len = cu_q_lens[seq + 1] - cu_q_lens[seq]
        return lax.cond(q_len <= _FEW_QUERIES, few, many, seq, outs)

    live = jnp.clip(operands.num_seqs[0], 0, operands.page_indices.shape[0])
    q = inputs.o.q
    # Like the queries, so that under shard_map they vary with them.
    outs = (
        jnp.zeros_like(q),
        jnp.full_like(q, -jnp.inf, jnp.float32, q.shape[:2]),
    )
    outs = lax.fori_loop(jnp.int32(0), live, sequence, outs)
    outs = tuple(x[: operands.q.shape[0]] for x in outs)
    return outs if params.return_lse else outs[:1]


def _padded(rows: jax.Array) -> jax.Array:
    return jnp.pad(rows, ((0, _MANY_QUERIES), *[(0, 0)] * (rows.ndim - 1)))


def _sequence(inputs: _Inputs, size: int, seq: jax.Array, outs: Any) -> Any:
    """Writes one sequence's rows, ``size`` queries at a time."""
    o = inputs.o
    begin = o.cu_q_lens[seq]
    q_len = o.cu_q_lens[seq + 1] - begin
    first = o.kv_lens[seq] - q_len  # position of the first query

    def block(i: jax.Array, outs: Any) -> Any:
        row = begin + i * size
        cut = functools.partial(
            lax.dynamic_slice_in_dim, start_index=row, slice_size=size
        )
        queries = _Queries(
            cut(o.q),
            None if o.tree_mask is None else cut(o.tree_mask),
            first + i * size,
            first + q_len - 1,
        )
        results = _attend(inputs, seq, queries, first)
        live = i * size + jnp.arange(size, dtype=jnp.int32) < q_len

        def put(out: jax.Array, result: jax.Array) -> jax.Array:
            rows = live.reshape(size, *[1] * (out.ndim - 1))
            result = jnp.where(rows, result, cut(out))
            return lax.dynamic_update_slice_in_dim(out, result, row, 0)

        return jax.tree.map(put, outs, results)

    blocks = (q_len + size - 1) // size
    return lax.fori_loop(jnp.int32(0), blocks, block, outs)


def _attend(
    inputs: _Inputs, seq: jax.Array, queries: _Queries, first_new: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Output and lse of the queries; first_new: of the step's first token."""
    size, num_q_heads, head_dim = queries.q.shape
    params, kv_heads = inputs.params, inputs.kv_heads
    shape = (kv_heads, num_q_heads // kv_heads, size)
    grouped = queries.q.reshape(size, *shape[:2], head_dim)
    first = queries.first
    positions = first + jnp.arange(size, dtype=jnp.int32)[:, None]
    kv_len = inputs.o.kv_lens[seq]
    begin, end = masking.visible_range(
        first,
        jnp.minimum(first + size - 1, queries.last),
        kv_len,
        params,
        tree=queries.tree is not None,
    )
    step = inputs.block_pages * inputs.page_size

    def block(i: jax.Array, state: Any) -> Any:
        highest, total, acc = state
        keys = i * step + jnp.arange(step, dtype=jnp.int32)
        k, v = _gather(inputs, seq, i, (keys >= begin) & (keys < end))
        logits = _scaled(_dot("nhgd,mhd->hgnm", grouped, k), inputs.o.k_scale)
        seen = masking.visible(
            positions,
            keys[None, :],
            kv_len,
            params,
            tree=None
            if queries.tree is None
            else (
                [
                    queries.tree[:, i : i + 1]
                    for i in range(queries.tree.shape[1])
                ],
                keys[None, :] - first_new,
            ),
        )
        logits = jnp.where(seen, masking.capped(logits, params), -jnp.inf)
        weights, highest, factor = softmax.weigh(logits, highest)
        total = total * factor + weights.sum(axis=-1, keepdims=True)
        acc = acc * factor + _dot("hgnm,mhd->hgnd", weights.astype(v.dtype), v)
        return highest, total, acc

    # Like the queries, so that under shard_map they vary with them.
    highest = jnp.full_like(queries.q, -jnp.inf, jnp.float32, (*shape, 1))
    total = jnp.zeros_like(queries.q, jnp.float32, (*shape, 1))
    acc = jnp.zeros_like(queries.q, jnp.float32, (*shape, head_dim))
    if inputs.o.sinks is not None:
        # A key that was seen before all others and has no value.
        sinks = inputs.o.sinks.reshape(*shape[:2], 1, 1)
        highest = jnp.maximum(highest, sinks)
        total += 1.0
    highest, total, acc = lax.fori_loop(
        begin // step,
        (end + step - 1) // step,
        block,
        (highest, total, acc),
    )
    out = _scaled(softmax.normalise(acc, total), inputs.o.v_scale)
    lse = softmax.log_sum(highest, total)[..., 0]
    out, lse = (jnp.moveaxis(x, 2, 0) for x in (out, lse))
    out = out.reshape(queries.q.shape).astype(queries.q.dtype)
    return out, lse.reshape(size, num_q_heads)


def _scaled(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Times a factor per KV head, the first axis."""
    return x if scale is None else x * scale.reshape(-1, *[1] * (x.ndim - 1))


def _gather(
    inputs: _Inputs, seq: jax.Array, block: jax.Array, live: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """K and V of a block; what is not live reads as 0, whatever it holds."""
    o, pages = inputs.o, inputs.block_pages
    slots = block * pages + jnp.arange(pages, dtype=jnp.int32)
    used = live.reshape(pages, inputs.page_size).any(axis=1)
    row = o.page_indices[seq]
    ids = row.at[slots].get(mode="clip")
    ids = jnp.where(used, ids, 0)
    kv = split_heads(
        o.kv_pages.at[ids].get(mode="clip"),
        inputs.params.kv_layout,
        inputs.kv_heads,
        o.head_dim,
    )
    wide = o.q.dtype

    def rows(x: jax.Array) -> jax.Array:
        x = x.reshape(pages * inputs.page_size, *x.shape[2:]).astype(wide)
        return jnp.where(live[:, None, None], x, 0)

    return rows(kv[0]), rows(kv[1])


def _dot(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        equation,
        a,
        b,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
