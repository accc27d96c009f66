"""Attention over parts of the keys, put together."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge_states(
    outs: jax.Array, lses: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys from that over disjoint parts of them.

    Args:
      outs: [parts, ..., D].
      lses: f32[parts, ...], log-sum-exp of each part's logits; -inf for a
        part without keys, whose out does not count.

    Returns:
      out: [..., D], outs' dtype, computed in float32; 0 where no part has
        keys.
      lse: f32[...], -inf there.
    """
    lses = lses.astype(jnp.float32)
    some = lses > -jnp.inf
    highest = jnp.max(lses, axis=0)
    none = highest == -jnp.inf
    # Not even the branch that is not taken may be NaN: its gradient counts.
    # An lse of +inf or NaN is of broken numbers, and shows as NaN.
    shift = jax.lax.stop_gradient(jnp.where(none, 0.0, highest))
    weights = jnp.where(some, jnp.exp(jnp.where(some, lses - shift, 0.0)), 0.0)
    total = jnp.sum(weights, axis=0)
    total = jnp.where(none, 1.0, total)
    parts = jnp.where(some[..., None], outs.astype(jnp.float32), 0.0)
    out = jnp.sum(parts * (weights / total)[..., None], axis=0)
    lse = jnp.where(none, -jnp.inf, shift + jnp.log(total))
    return out.astype(outs.dtype), lse
