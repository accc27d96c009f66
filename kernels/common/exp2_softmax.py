"""One step of an online softmax in base 2, on registers without lane moves.

State per row of queries: the running maximum of the logits (times log2 e), the
same in all LANES lanes; and the running total of the weights, *spread*: a row's
total is the sum over its lanes. Spread totals need no lane reduction per block,
equal maxima no broadcast. Masked logits are -inf and count exactly 0; a block
without a visible key changes nothing, not by one bit.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

LANES = 128
LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def widen(column: Any, width: int) -> Any:
    """[rows, LANES] with equal lanes to [rows, width]."""
    if width <= LANES:
        return column[:, :width]
    copies = jnp.concatenate([column] * -(-width // LANES), axis=1)
    return copies if width % LANES == 0 else copies[:, :width]


def spread_sum(weights: Any) -> Any:
    """Sums f32[rows, keys] to [rows, LANES], whose lanes sum to the total."""
    rows, keys = weights.shape
    whole = keys // LANES * LANES
    parts = [weights[:, i : i + LANES] for i in range(0, whole, LANES)]
    total = sum(parts[1:], parts[0]) if parts else 0.0
    if whole == keys:
        return total
    rest = jnp.sum(weights[:, whole:], axis=1, keepdims=True)
    first = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1) == 0
    return total + jnp.where(first, rest, 0.0)


def weigh(logits: Any, highest: Any, *, masked: bool) -> tuple[Any, Any, Any]:
    """Turns a block's logits into weights.

    Args:
      logits: f32[rows, keys], times log2 e; -inf where masked.
      highest: f32[rows, LANES], the running maximum so far, lanes equal.
      masked: False promises that every logit is finite.

    Returns:
      weights f32[rows, keys], the new running maximum, and the factor
      f32[rows, LANES] for what was summed up under the old one.
    """
    peak = jnp.max(logits, axis=1, keepdims=True)
    new = jnp.maximum(highest, jnp.broadcast_to(peak, highest.shape))
    shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
    weights = jnp.exp2(logits - widen(shift, logits.shape[1]))
    return weights, new, jnp.exp2(highest - shift)
