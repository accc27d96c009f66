"""What keeps the TPU kernels from compiling: their limits, with remedies."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from pagemill.errors import Problem
from pagemill.kernels.common.kv_block import KVBlock, kv_block
from pagemill.kernels.common.page_table import PageTable
from pagemill.kernels.common.scalar_memory import SMEM_LIMIT
from pagemill.kernels.ragged_paged_attention import decode_shape, prefill_shape
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams, Tuning


def tpu_limits(
    call: Mapping[str, Any], layout: KVLayout = KVLayout.INTERLEAVED
) -> Iterator[Problem]:
    """Limits that a call goes past.

    Any page_size, head_dim and number of heads will do, and a page table of any
    size: one too large for scalar memory stays in HBM. The other metadata lie
    in scalar memory as a whole. A block has two keys at least.

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
    yield from _single_keys(call, block, tuning)
    yield from _scalar_memory(call, block, tuning)
    yield from _vector_memory(call, block, tuning)


def _single_keys(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> Iterator[Problem]:
    pages = decode_shape.fit_block_pages(block, call["P"], tuning)
    if pages * block.page_size > 1:
        return
    # The compiler refuses bfloat16 products with a single key.
    yield Problem(
        "page_indices" if call["P"] == 1 else "num_kv_pages_per_block",
        f"page_size=1, page_indices.shape=({call['S']}, {call['P']}) and "
        f"num_kv_pages_per_block={tuning.num_kv_pages_per_block} make blocks "
        "of one key; the least is 2.",
        "Bring rows of at least 2 pages and let a block hold 2.",
    )


def _scalar_memory(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> Iterator[Problem]:
    need = max(
        table.smem_bytes
        for table in (
            _decode_table(call, block, tuning),
            _prefill_table(call, block, tuning),
        )
    )
    if need <= SMEM_LIMIT:
        return
    tokens, seqs, slots = call["T"], call["S"], call["P"]
    needs = f"need {need} bytes of scalar memory; the limit is {SMEM_LIMIT}."
    if tuning.stream_page_table is False:
        yield Problem(
            "page_indices",
            f"page_indices.shape=({seqs}, {slots}) and the other metadata "
            f"{needs}",
            "Leave stream_page_table at None: so large a table then stays in "
            "HBM.",
        )
        return
    yield Problem(
        "kv_lens",
        f"The metadata of kv_lens.shape=({seqs},) and {tokens} query tokens "
        f"{needs}",
        "Bring fewer sequences or tokens per call.",
    )


def _decode_table(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> PageTable:
    words = 1
    if call.get("tree_mask") is not None:
        words = call["S"] * (tuning.num_decode_queries or 1)
    return decode_shape.fit_table(
        call["S"] * call["P"],
        call["S"],
        words,
        block_pages=decode_shape.fit_block_pages(block, call["P"], tuning),
        tuning=tuning,
    )


def _prefill_table(
    call: Mapping[str, Any], block: KVBlock, tuning: Tuning
) -> PageTable:
    shape = _prefill(call, block, tuning)
    return prefill_shape.fit_table(
        call["S"] * call["P"], call["S"], shape, tuning
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
