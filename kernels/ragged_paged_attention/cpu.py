"""The op on CPUs: a native handler through XLA's foreign function interface."""

from __future__ import annotations

import jax
import numpy as np
from pagemill import dispatch
from pagemill.params import AttentionParams, Tuning

_TARGET = "pagemill_ragged_paged_attention"

dispatch.register_ffi_targets()


def ragged_paged_attention_cpu(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    params: AttentionParams,
    tuning: Tuning,
) -> jax.Array:
    """Attention of every live query token; see the op for the arguments.

    The handler checks the metadata's values before it reads anything else. In
    its attributes 0 stands for None.
    """
    del tuning  # Cuts the work of the TPU kernel only.
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return call(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale=np.float32(params.sm_scale),
        soft_cap=np.float32(params.soft_cap or 0.0),
        sliding_window=np.int64(params.sliding_window or 0),
        causal=np.bool_(params.causal),
    )
