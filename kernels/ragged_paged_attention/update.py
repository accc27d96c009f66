"""Writing paged KV: scatters in plain jnp."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def slot_mapping(
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    max_num_tokens: int,
    page_size: int,
) -> jax.Array:
    """Where each token of a batch goes.

    Returns:
      i32[max_num_tokens]: ``page * page_size + offset``; -1 for dead tokens.
    """
    rows = page_indices.shape[0]
    live = jnp.clip(num_seqs[0], 0, rows)
    token = jnp.arange(max_num_tokens, dtype=jnp.int32)
    # Rows behind num_seqs may hold anything: they end where the live ones do.
    ends = jnp.where(jnp.arange(rows) < live, cu_q_lens[1:], cu_q_lens[live])
    seq = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
    seq = jnp.minimum(seq, rows - 1)
    position = kv_lens[seq] - cu_q_lens[seq + 1] + token
    page = page_indices[
        seq, jnp.clip(position // page_size, 0, page_indices.shape[1] - 1)
    ]
    slot = page * page_size + position % page_size
    total = jnp.where(live > 0, cu_q_lens[live], 0)
    return jnp.where((token < total) & (position >= 0), slot, jnp.int32(-1))


def update_kv_pages(
    kv_pages: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array
) -> jax.Array:
    """Writes token t's k and v into slot slots[t]; -1 writes nothing."""
    pages, page_size, combined, head_dim = kv_pages.shape
    kv = jnp.stack([k, v], axis=2).reshape(-1, combined, head_dim)
    # A negative index would count from the end: send it past it instead.
    slots = jnp.where(slots < 0, pages * page_size, slots)
    flat = kv_pages.reshape(pages * page_size, combined, head_dim)
    flat = flat.at[slots].set(kv, mode="drop")
    return flat.reshape(kv_pages.shape)


def copy_pages(kv_pages: Any, copies: Any) -> jax.Array:
    """Copies whole pages; all sources are read before a target is written.

    Args:
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim];
        donate it under jit, so that it is written in place.
      copies: i32[n, 2] of (source, target), as
        :meth:`pagemill.PagePool.take_page_copies` gives them.

    Returns:
      The updated pages.
    """
    kv_pages, copies = jnp.asarray(kv_pages), jnp.asarray(copies)
    return kv_pages.at[copies[:, 1]].set(kv_pages[copies[:, 0]], mode="drop")
