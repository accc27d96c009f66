"""What keeps the TPU kernels from compiling: their limits, with remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from pagemill.errors import Problem
from pagemill.kernels.common.kv_block import KVBlock, kv_block
from pagemill.kernels.ragged_paged_attention import decode_shape, prefill_shape
from pagemill.kv_cache import KVLayout
from pagemill.params import SMEM_BYTES, SMEM_RESERVE, AttentionParams, Tuning

# Scalar operands lie in scalar memory whole, on every generation; the compiler
# keeps a few KiB to itself.
SMEM_LIMIT = min(SMEM_BYTES.values()) - SMEM_RESERVE
# Each scalar operand is rounded up.
_SMEM_GRANULE = 2**10


def tpu_limits(
    call: Mapping[str, Any], layout: KVLayout = KVLayout.INTERLEAVED
) -> Iterator[Problem]:
    """Limits that a call goes past.

    Any page_size, head_dim and number of heads will do. The page table and the
    other metadata lie in scalar memory as a whole.

    Args:
      call: letters, operands and options of the op's spec.
      layout: of kv_pages.
    """
    params = AttentionParams(
        sm_scale=1.0, num_kv_heads=call["num_kv_heads"], kv_layout=layout
    )
    fields = dataclasses.fields(Tuning)
    tuning = Tuning(**{f.name: call.get(f.name) for f in fields})
    planes = layout is KVLayout.PLANES
    head_dim = max(call["D"], call.get("v_head_dim") or 0)
    head_dim = call["kv_pages"].shape[-1] if planes else head_dim
    block = kv_block(call["kv_pages"], params, head_dim=head_dim)
    yield from _scalar_memory(call, block, tuning)
    yield from _vector_memory(call, block, tuning)


def smem_bytes(
    max_num_tokens: int, max_num_seqs: int, pages_per_seq: int, queries: int
) -> int:
    """Bytes of a kernel's scalar operands; tiles of that many queries."""
    tiles = -(-max_num_tokens // queries)
    table = max_num_seqs * pages_per_seq
    return sum(
        -(-4 * entries // _SMEM_GRANULE) * _SMEM_GRANULE
        for entries in (tiles, tiles, max_num_seqs, table, max_num_seqs + 1, 1)
    )


def _scalar_memory(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> Iterator[Problem]:
    shape = _prefill(call, block, tuning)
    seqs, slots = call["S"], call["P"]

    def need(slots: int) -> int:
        return smem_bytes(call["T"], seqs, slots, shape.queries)

    if need(slots) <= SMEM_LIMIT:
        return
    page_size, fitting = block.page_size, slots
    while need(fitting) > SMEM_LIMIT and fitting > 1:
        page_size, fitting = 2 * page_size, -(-fitting // 2)
    yield Problem(
        "page_indices",
        f"page_indices.shape=({seqs}, {slots}) and the other metadata need "
        f"{need(slots)} bytes of scalar memory; the limit is {SMEM_LIMIT}.",
        f"Use pages of at least {page_size} tokens, so that rows are shorter, "
        "or fewer sequences.",
    )


def _vector_memory(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> Iterator[Problem]:
    shape = _prefill(call, block, tuning)
    pages = decode_shape.fit_block_pages(block, call["P"], tuning)
    need = max(
        prefill_shape.vmem_bytes(shape),
        decode_shape.buffer_bytes(block, pages),
    )
    if need > shape.vmem_limit:
        yield Problem(
            "vmem_limit_bytes",
            f"The kernel's buffers need about {need} bytes of vector memory; "
            f"vmem_limit_bytes={shape.vmem_limit}.",
            "Use smaller pages or blocks, or raise vmem_limit_bytes where the "
            "chip has more.",
        )


def _prefill(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> prefill_shape.PrefillShape:
    q = call["q"]
    padded = jax.ShapeDtypeStruct((*q.shape[:2], block.head_dim), q.dtype)
    return prefill_shape.fit(padded, block, call["P"], tuning, columns=None)
