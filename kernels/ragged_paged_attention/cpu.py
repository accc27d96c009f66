"""The op on CPUs: a native handler through XLA's foreign function interface."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pagemill import dispatch
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.params import AttentionParams, Tuning

_TARGET = "pagemill_ragged_paged_attention"

dispatch.register_ffi_targets()


def ragged_paged_attention_cpu(
    operands: Operands, *, params: AttentionParams, tuning: Tuning
) -> tuple[jax.Array, ...]:
    """Attention of every live query token; see the op for the arguments.

    The handler checks the metadata's values before it reads anything else. In
    its attributes 0 stands for None, in its operands an empty array.
    """
    del tuning  # Cuts the work of the TPU kernel only.
    o = operands
    lse = o.q.shape[:2] if params.return_lse else (0,)
    call = jax.ffi.ffi_call(
        _TARGET,
        [
            jax.ShapeDtypeStruct(o.q.shape, o.q.dtype),
            jax.ShapeDtypeStruct(lse, jnp.float32),
        ],
    )
    outs = call(
        *o[:6],
        _or_empty(o.sinks),
        _or_empty(o.k_scale),
        _or_empty(o.v_scale),
        _or_empty(o.tree_mask, jnp.uint32),
        num_kv_heads=np.int64(params.num_kv_heads or 0),
        kv_layout=np.int64(params.kv_layout.code),
        sm_scale=np.float32(params.sm_scale),
        soft_cap=np.float32(params.soft_cap or 0.0),
        sliding_window=np.int64(params.sliding_window or 0),
        causal=np.bool_(params.causal),
    )
    return tuple(outs if params.return_lse else outs[:1])


def _or_empty(array: Any, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros((0,), dtype) if array is None else array
