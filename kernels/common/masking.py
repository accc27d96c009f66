"""Which keys a query sees: written once, for scalars and for arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from pagemill.params import AttentionParams

_WORD_BITS = 32


def visible(
    query: Any,
    key: Any,
    kv_len: Any,
    params: AttentionParams,
    tree: tuple[Sequence[Any], Any] | None = None,
) -> Any:
    """True where a query sees a key.

    Args:
      query: i32, positions of queries; broadcasts against ``key``.
      key: i32, positions of keys.
      kv_len: i32, keys that there are.
      params: causal and sliding_window.
      tree: arguments of in_tree(), in place of causal.
    """
    seen = (key >= 0) & (key < kv_len)
    if tree is not None:
        seen &= in_tree(*tree)
    elif params.causal:
        seen &= key <= query
    if params.sliding_window is not None:
        # The difference, not query - window + 1: no overflow for any window.
        seen &= query - key < params.sliding_window
    return seen


def in_tree(words: Sequence[Any], number: Any) -> Any:
    """True where a query's bits name a key.

    Args:
      words: u32 or i32 of the queries, low bits first; they broadcast against
        number.
      number: i32 of keys among the tokens of their step; negative ones are
        older and always named, those past the words never.
    """
    seen = number < 0
    for i, word in enumerate(words):
        bit = number - _WORD_BITS * i
        held = (bit >= 0) & (bit < _WORD_BITS)
        shift = jnp.where(held, bit, 0).astype(word.dtype)
        seen |= held & ((word >> shift) & 1 != 0)
    return seen


def visible_range(
    first: Any,
    last: Any,
    kv_len: Any,
    params: AttentionParams,
    *,
    tree: bool = False,
) -> tuple[Any, Any]:
    """Keys [begin, end) that hold all that queries [first, last] see.

    Args:
      first: i32, the lowest position of a query.
      last: i32, the highest.
      kv_len: i32, keys that there are.
      params: causal and sliding_window.
      tree: a tree mask takes the place of causal.
    """
    begin = jnp.int32(0)
    if params.sliding_window is not None:
        begin = jnp.maximum(first - (params.sliding_window - 1), 0)
    end = kv_len
    if params.causal and not tree:
        end = jnp.minimum(last + 1, kv_len)
    return jnp.minimum(begin, jnp.maximum(end, 0)), jnp.maximum(end, 0)


def bounds(
    query: Any, kv_len: Any, params: AttentionParams, *, tree: bool = False
) -> tuple[Any, Any]:
    """Keys [begin, end) that a query sees; none where end <= begin.

    Two numbers per query instead of a test per pair. Both grow with the
    query, so that those of the first and last of several queries bound what
    any of them, and what all of them see.

    Args:
      query: i32, positions of queries; negative ones have no key of their own.
      kv_len: i32, keys that there are.
      params: causal and sliding_window.
      tree: a tree mask takes the place of causal, and hides more.
    """
    begin = jnp.zeros_like(query)
    if params.sliding_window is not None:
        # The query first raised to 0: no overflow for any window.
        begin = jnp.maximum(query, 0) - (params.sliding_window - 1)
        begin = jnp.maximum(begin, 0)
    end = jnp.zeros_like(query) + jnp.maximum(kv_len, 0)
    if params.causal and not tree:
        end = jnp.minimum(jnp.maximum(query + 1, 0), end)
    return begin, end


def capped(logits: Any, params: AttentionParams) -> Any:
    """Scaled logits with the soft cap applied, before any mask."""
    logits = logits * params.sm_scale
    if params.soft_cap is not None:
        logits = params.soft_cap * jnp.tanh(logits / params.soft_cap)
    return logits
