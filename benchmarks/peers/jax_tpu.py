"""JAX's own ragged paged attention, as specs for pagemill.inspect.

It comes with JAX: jax.experimental.pallas.ops.tpu.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    kernel as theirs,
)
from pagemill.inspect import simulated_scalars

from benchmarks.tpu_work import (
    HEAD_DIM,
    KV_HEADS,
    Q_HEADS,
    Work,
    block_macs,
    integers,
    shaped,
)

KERNEL = "ragged_paged_attention_kernel"
_VMEM = 64 * 2**20
_KEYS = 512


def attend(
    queries: int, *, simulated: bool = False, **work: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Blocks of ``queries`` tokens by 512 of KV.

    Args:
      queries: of a block.
      simulated: whether the simulator has to see the workload's scalars.
      **work: fields of Work.
    """
    made = Work(**work)
    fn = functools.partial(
        theirs.ragged_paged_attention,
        num_kv_pages_per_block=_KEYS // made.page_size,
        num_queries_per_block=queries,
        vmem_limit_bytes=_VMEM,
    )
    args = (
        shaped(made.tokens, Q_HEADS, HEAD_DIM),
        shaped(
            made.total_num_pages,
            made.page_size,
            2 * KV_HEADS,
            HEAD_DIM,
            dtype=made.kv_dtype,
        ),
        integers(made.seqs),
        integers(made.seqs, made.pages_per_seq),
        integers(made.seqs + 1),
        integers(1),
    )
    known = {"loop_kv": _KEYS, "loop_macs": block_macs(queries, _KEYS)}
    return (
        simulated_scalars(fn, _scalars(made)) if simulated else fn,
        args,
        known,
    )


def _scalars(work: Work) -> list[Any]:
    return [
        work.length,
        lambda seq, slot: seq * work.pages_per_seq + slot,
        lambda seq: seq * work.q_len,
        None,  # its own counters
        work.seqs,
    ]
