"""How the TPU kernel cuts its work, and what it cannot cut."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from pagemill.params import Tuning

LANES = 128
_KEYS_PER_BLOCK = 256
_MIN_QUERIES = 16  # rows of a block fill a tile for any group of query heads
_MANY_TOKENS, _MANY_QUERIES = 512, 32
# What the compiler grants a kernel by default, on the generations where that is
# least. Fitted blocks stay well below it.
_VMEM_BUDGET = 8 * 2**20
VMEM_DEFAULT = 16 * 2**20
# Scalar operands lie in SMEM whole, each rounded up.
_SMEM_GRANULE = 2**10


@dataclasses.dataclass(frozen=True)
class KernelShape:
    """What the kernel's buffers depend on."""

    max_num_tokens: int
    pages_per_seq: int
    page_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype[np.generic]


@dataclasses.dataclass(frozen=True)
class BlockSizes:
    """Pages and queries of a block; queries are a power of two."""

    pages: int
    queries: int


def smem_bytes(
    shape: KernelShape, max_num_seqs: int, blocks: BlockSizes
) -> int:
    """Bytes of the kernel's scalar operands."""
    grid = -(-shape.max_num_tokens // blocks.queries)
    table = max_num_seqs * shape.pages_per_seq
    return sum(
        -(-4 * entries // _SMEM_GRANULE) * _SMEM_GRANULE
        for entries in (grid, grid, max_num_seqs, table, max_num_seqs + 1)
    )


def fit(shape: KernelShape, tuning: Tuning) -> BlockSizes:
    """Block sizes for a shape; values that are set are kept.

    ``num_queries_per_block`` is rounded up to a power of two of 16 at least.
    """
    queries = tuning.num_queries_per_block
    if queries is None:
        many = shape.max_num_tokens >= _MANY_TOKENS
        queries = _MANY_QUERIES if many else _MIN_QUERIES
    queries = _power_of_two(max(queries, _MIN_QUERIES))
    pages = tuning.num_kv_pages_per_block
    if pages is not None:
        return BlockSizes(pages, queries)
    pages = max(_KEYS_PER_BLOCK // shape.page_size, 1)
    pages = min(pages, shape.pages_per_seq)
    budget = tuning.vmem_limit_bytes or _VMEM_BUDGET
    while pages > 1 and vmem_bytes(shape, BlockSizes(pages, queries)) > budget:
        pages //= 2
    return BlockSizes(pages, queries)


def words_shape(
    shape: KernelShape, blocks: BlockSizes
) -> tuple[int, int, int] | None:
    """Shape of the buffer in which a block lies as 32-bit words.

    A strided load takes one head's rows out of it. Such loads know 32-bit
    types and rows of one tile's lanes only, hence [D / 128, rows, 128]; None
    where the block itself can be loaded so.
    """
    chunks = -(-shape.head_dim // LANES)
    if shape.dtype.itemsize == 4 and chunks == 1:
        return None
    rows = blocks.pages * shape.page_size * 2 * shape.num_kv_heads
    rows = rows * shape.dtype.itemsize // 4
    return chunks, rows, min(shape.head_dim, LANES)


def vmem_bytes(shape: KernelShape, blocks: BlockSizes) -> int:
    """Bytes of VMEM that the kernel takes, tiles padded; an estimate."""
    lanes = -(-shape.head_dim // LANES) * LANES
    keys = blocks.pages * shape.page_size
    rows = blocks.queries * shape.num_q_heads
    item = shape.dtype.itemsize
    kv = 2 * keys * 2 * shape.num_kv_heads * lanes * item
    words = words_shape(shape, blocks)
    words_bytes = 0 if words is None else math.prod(words[:2]) * LANES * 4
    q_and_out = 2 * 2 * rows * lanes * item  # double-buffered by the pipeline
    state = rows * (lanes + 2 * LANES) * 4
    logits = 2 * rows // shape.num_kv_heads * keys * 4
    buffers = kv + words_bytes + q_and_out + state + logits
    return buffers * 9 // 8  # an eighth for the compiler's own


def _power_of_two(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()
