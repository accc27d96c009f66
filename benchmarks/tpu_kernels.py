"""Our kernels, as specs for pagemill.inspect: the one place that names them.

A spec is a kernel as the op calls it with default tuning, for a workload.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from pagemill.inspect import simulated_scalars
from pagemill.kernels.common.kv_block import kv_block
from pagemill.kernels.ragged_paged_attention import decode_shape, prefill_shape
from pagemill.kernels.ragged_paged_attention.decode import decode_attention
from pagemill.kernels.ragged_paged_attention.prefill import prefill_attention
from pagemill.kv_cache import KVCacheSpec, KVLayout
from pagemill.params import AttentionParams, Tuning

from benchmarks.tpu_work import (
    HEAD_DIM,
    KV_HEADS,
    Q_HEADS,
    Work,
    block_macs,
    integers,
    shaped,
)

# What finds the kernels among a program's fusions.
DECODE = "^decode_attention"
PREFILL = "^prefill_attention"
_PARAMS = AttentionParams(
    sm_scale=HEAD_DIM**-0.5, num_kv_heads=KV_HEADS, kv_layout=KVLayout.PLANES
)


def decode(*, simulated: bool = False, **fields: Any) -> Any:
    """Sequences with one query token each.

    Args:
      simulated: whether the simulator has to see the workload's scalars.
      **fields: of Work.
    """
    work = Work(**fields)
    pages = _pages(work)
    args = (
        shaped(work.seqs, 1, Q_HEADS, HEAD_DIM),
        pages,
        integers(work.seqs),
        integers(work.seqs),
        integers(work.seqs * work.pages_per_seq),
        integers(1),
    )
    fn = functools.partial(decode_attention, params=_PARAMS, tuning=Tuning())
    block = kv_block(pages, _PARAMS, head_dim=HEAD_DIM)
    fitted = decode_shape.fit_block_pages(block, work.pages_per_seq, Tuning())
    known = {"loop_kv": fitted * work.page_size}
    scalars: list[Any] = [work.length, 1, work.seqs, None, lambda slot: slot]
    return simulated_scalars(fn, scalars) if simulated else fn, args, known


def prefill(*, simulated: bool = False, **fields: Any) -> Any:
    """Sequences with many query tokens each; arguments as decode's."""
    work = Work(**fields)
    pages = _pages(work)
    args = (
        shaped(work.tokens, Q_HEADS, HEAD_DIM),
        pages,
        integers(work.seqs),
        integers(work.seqs * work.pages_per_seq),
        integers(work.seqs + 1),
        integers(1),
    )
    fn = functools.partial(prefill_attention, params=_PARAMS, tuning=Tuning())
    shape = prefill_shape.fit(
        args[0],
        kv_block(pages, _PARAMS, head_dim=HEAD_DIM),
        work.pages_per_seq,
        Tuning(),
        columns=None,
    )
    known = {
        "loop_kv": shape.keys,
        "loop_macs": block_macs(shape.queries, shape.keys),
    }
    scalars = _prefill_scalars(work, shape.queries)
    return simulated_scalars(fn, scalars) if simulated else fn, args, known


def _pages(work: Work) -> Any:
    spec = KVCacheSpec(
        work.total_num_pages,
        work.page_size,
        KV_HEADS,
        HEAD_DIM,
        work.kv_dtype,
        KVLayout.PLANES,
    )
    return shaped(*spec.shape, dtype=spec.dtype)


def _prefill_scalars(work: Work, queries: int) -> list[Any]:
    """The sequences of each tile of queries, and what the batch holds."""

    def first(tile: Any) -> Any:
        return lax.div(tile * queries, jnp.int32(work.q_len))

    def end(tile: Any) -> Any:
        last = lax.div((tile + 1) * queries - 1, jnp.int32(work.q_len))
        return jnp.minimum(last + 1, work.seqs)

    return [
        first,
        end,
        work.length,
        lambda seq: seq * work.q_len,
        work.seqs,
        lambda slot: slot,
    ]
