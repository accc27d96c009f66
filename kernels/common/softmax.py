"""One step of an online softmax, exact for any finite logits.

The running maximum starts at -inf and masked logits are -inf, so that a row
whose real logits are all very negative is still right, a masked key counts
exactly 0, and a block without a visible key changes nothing, not by one bit.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def weigh(logits: Any, highest: Any) -> tuple[Any, Any, Any]:
    """Turns a block's logits into weights.

    Args:
      logits: f32[..., rows, keys], -inf where masked.
      highest: f32[..., rows, 1], the running maximum so far.

    Returns:
      weights, the new running maximum, and the factor for what was summed up
      under the old one.
    """
    new = jnp.maximum(highest, jnp.max(logits, axis=-1, keepdims=True))
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    return jnp.exp(logits - shift), new, jnp.exp(highest - shift)


def normalise(acc: Any, total: Any) -> Any:
    """Divides acc by total; 0 where a row saw no key."""
    return jnp.where(
        total == 0.0, 0.0, acc / jnp.where(total == 0.0, 1.0, total)
    )


def log_sum(highest: Any, total: Any) -> Any:
    """The log-sum-exp of a row's logits; -inf where it saw no key."""
    return jnp.where(
        total == 0.0,
        -jnp.inf,
        highest + jnp.log(jnp.where(total == 0.0, 1.0, total)),
    )
