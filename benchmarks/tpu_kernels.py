"""Our kernels, as specs for pagemill.inspect: the one place that names them.

A spec is a kernel as the op calls it with default tuning, for a workload.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from pagemill.inspect import simulated_scalars
from pagemill.kernels.ragged_paged_attention import tuning as tuning_lib
from pagemill.kernels.ragged_paged_attention.kernel import (
    ragged_paged_attention_tpu,
)
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

# What finds the kernel among a program's fusions.
DECODE = PREFILL = "^ragged_paged_attention"


def decode(*, simulated: bool = False, **work: Any) -> Any:
    """Sequences with one query token each.

    Args:
      simulated: whether the simulator has to see the workload's scalars.
      **work: fields of Work.
    """
    return _attend(Work(**work), simulated=simulated)


def prefill(*, simulated: bool = False, **work: Any) -> Any:
    """Sequences with many query tokens each; arguments as decode's."""
    return _attend(Work(**work), simulated=simulated)


def _attend(work: Work, *, simulated: bool) -> Any:
    args = (
        shaped(work.tokens, Q_HEADS, HEAD_DIM),
        shaped(
            work.total_num_pages,
            work.page_size,
            2 * KV_HEADS,
            HEAD_DIM,
            dtype=work.kv_dtype,
        ),
        integers(work.seqs),
        integers(work.seqs, work.pages_per_seq),
        integers(work.seqs + 1),
        integers(1),
    )
    blocks = tuning_lib.fit(
        tuning_lib.KernelShape(
            max_num_tokens=work.tokens,
            pages_per_seq=work.pages_per_seq,
            page_size=work.page_size,
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=args[1].dtype,
        ),
        Tuning(),
    )
    fn = functools.partial(
        ragged_paged_attention_tpu,
        params=AttentionParams(sm_scale=HEAD_DIM**-0.5),
        tuning=Tuning(),
    )
    keys = blocks.pages * work.page_size
    known = {"loop_kv": keys, "loop_macs": block_macs(blocks.queries, keys)}
    scalars = _scalars(work, blocks.queries)
    return simulated_scalars(fn, scalars) if simulated else fn, args, known


def _scalars(work: Work, queries: int) -> list[Any]:
    """The sequences of each query block, and what the batch holds."""

    def first(block: Any) -> Any:
        return lax.div(block * queries, jnp.int32(work.q_len))

    def end(block: Any) -> Any:
        last = lax.div((block + 1) * queries - 1, jnp.int32(work.q_len))
        return jnp.minimum(last + 1, work.seqs)

    return [
        first,
        end,
        work.length,
        lambda slot: slot,
        lambda seq: seq * work.q_len,
    ]
