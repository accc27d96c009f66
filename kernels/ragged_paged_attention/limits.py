"""What keeps the TPU kernel from compiling: its limits, with remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from pagemill.errors import Problem
from pagemill.kernels.ragged_paged_attention import tuning as tuning_lib
from pagemill.kernels.ragged_paged_attention.tuning import LANES, KernelShape
from pagemill.params import SMEM_BYTES, SMEM_RESERVE, Tuning

# What the compiler grants a kernel by default, on the generations where that
# is least.
VMEM_DEFAULT = 16 * 2**20
# Scalar operands lie in scalar memory whole, on every generation; the compiler
# keeps a few KiB to itself.
SMEM_LIMIT = min(SMEM_BYTES.values()) - SMEM_RESERVE


def tpu_limits(call: Mapping[str, Any]) -> Iterator[Problem]:
    """Limits that a call goes past.

    Any page_size and number of heads will do, and any head_dim up to a tile's
    lanes: beyond, whole tiles only, since heads are loaded tile by tile.

    Args:
      call: letters, operands and options of the op's spec.
    """
    shape = KernelShape(
        max_num_tokens=call["T"],
        pages_per_seq=call["P"],
        page_size=call["page"],
        num_q_heads=call["Hq"],
        num_kv_heads=call["num_kv_heads"],
        head_dim=call["D"],
        dtype=np.dtype(call["q"].dtype),
    )
    fields = dataclasses.fields(Tuning)
    tuning = Tuning(**{f.name: call.get(f.name) for f in fields})
    yield from _head_dim(shape.head_dim)
    yield from _scalar_memory(shape, call["S"], tuning)
    yield from _vector_memory(shape, tuning)


def _head_dim(head_dim: int) -> Iterator[Problem]:
    if head_dim > LANES and head_dim % LANES:
        padded = -(-head_dim // LANES) * LANES
        yield Problem(
            "head_dim",
            f"head_dim={head_dim} must be at most {LANES} or a multiple of it "
            "on TPUs.",
            f"Pad q and kv_pages with zeros to {padded}, and keep the sm_scale "
            f"of {head_dim}.",
        )


def _scalar_memory(
    shape: KernelShape, max_num_seqs: int, tuning: Tuning
) -> Iterator[Problem]:
    def need(shape: KernelShape) -> int:
        return tuning_lib.smem_bytes(
            shape, max_num_seqs, tuning_lib.fit(shape, tuning)
        )

    if need(shape) <= SMEM_LIMIT:
        return
    fitting = shape
    while need(fitting) > SMEM_LIMIT and fitting.pages_per_seq > 1:
        fitting = dataclasses.replace(
            fitting,
            page_size=2 * fitting.page_size,
            pages_per_seq=-(-fitting.pages_per_seq // 2),
        )
    yield Problem(
        "page_indices",
        f"page_indices.shape=({max_num_seqs}, {shape.pages_per_seq}) and the "
        f"other metadata need {need(shape)} bytes of scalar memory; the limit "
        f"is {SMEM_LIMIT}.",
        f"Use pages of at least {fitting.page_size} tokens, so that rows are "
        "shorter, or fewer sequences.",
    )


def _vector_memory(shape: KernelShape, tuning: Tuning) -> Iterator[Problem]:
    need = tuning_lib.vmem_bytes(shape, tuning_lib.fit(shape, tuning))
    limit = tuning.vmem_limit_bytes or VMEM_DEFAULT
    if need > limit:
        yield Problem(
            "vmem_limit_bytes",
            f"The kernel's buffers need about {need} bytes of vector memory; "
            f"vmem_limit_bytes={limit}.",
            "Use smaller pages or blocks, or raise vmem_limit_bytes where the "
            "chip has more.",
        )
