"""The public function over attention's results."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from pagemill import spec
from pagemill.kernels.common import merge
from pagemill.kernels.ragged_paged_attention.spec import MERGE_STATES


def merge_states(outs: Any, lses: Any) -> tuple[jax.Array, jax.Array]:
    """Attention over all keys from that over disjoint parts of them.

    What :func:`ragged_paged_attention` gives with ``return_lse=True`` for a
    shared prefix and for the rest, say, or on several devices. A sink may be
    in one part only. Computed in float32, differentiable, on any platform.

    Args:
      outs: f32 or bf16 [parts, max_num_tokens, num_q_heads, v_head_dim].
      lses: f32 [parts, max_num_tokens, num_q_heads], the log-sum-exp of each
        part's logits; -inf for one without keys, whose out does not count.

    Returns:
      out, [max_num_tokens, num_q_heads, v_head_dim], outs' dtype, and lse, f32
      [max_num_tokens, num_q_heads]: 0 and -inf where no part has keys.

    Raises:
      PagemillError: shapes or dtypes that do not fit.
    """
    spec.check(MERGE_STATES, {"outs": outs, "lses": lses})
    return merge.merge_states(jnp.asarray(outs), jnp.asarray(lses))
