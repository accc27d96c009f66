"""Runs of tokens: one behind the other, as their slots are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def padded(slots: jax.Array, block: int) -> jax.Array:
    """Slots of whole blocks of tokens; what is added is dead."""
    missing = -slots.shape[0] % block
    return jnp.pad(slots, (0, missing), constant_values=jnp.int32(-1))


def run_lengths(
    slots: jax.Array, block: int, tile: int | None = None
) -> jax.Array:
    """How many tokens from each one on belong to its run.

    Args:
      slots: i32[T] of whole blocks; -1 for dead tokens, whose runs are theirs.
      block: a run does not cross a multiple of so many tokens,
      tile: nor one of so many slots.

    Returns:
      i32[T], at least 1.
    """
    token = jnp.arange(slots.shape[0], dtype=jnp.int32)
    before = jnp.concatenate([slots[:1], slots[:-1]])
    live = slots >= 0
    follows = jnp.where(live, (before >= 0) & (slots == before + 1), before < 0)
    begins = (token % block == 0) | ~follows
    if tile is not None:
        begins |= live & (slots % tile == 0)
    end = jnp.int32(slots.shape[0])
    begin = jnp.where(begins, token, end)
    nearest = lax.cummin(begin, reverse=True)
    return jnp.concatenate([nearest[1:], end[None]]) - token
