"""How the prefill kernel cuts its work, by shape and TPU generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from pagemill.kernels.common.chip import chip
from pagemill.kernels.common.kv_block import KVBlock
from pagemill.kernels.common.page_table import PageTable, fit_page_table
from pagemill.params import Tuning

LANES = 128
BUFFERS = 2  # of blocks
_ROWS_PER_TILE = 512  # of queries that share a KV head
_MIN_QUERIES, _MAX_QUERIES = 16, 256
_KEYS_PER_BLOCK = 512
_VMEM_FOR_BUFFERS = 3 / 4  # the rest is for what the compiler spills


@dataclasses.dataclass(frozen=True)
class PrefillShape:
    """What the kernel's buffers and loops depend on."""

    tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    kv_dtype: np.dtype[np.generic]
    out_dtype: np.dtype[np.generic]
    queries: int  # tokens of a tile, a power of two
    block_pages: int
    columns: bool  # scores as [keys, rows], not [rows, keys]
    vmem_limit: int  # bytes
    cores: int = 1
    split: bool = False  # blocks of keys are split into planes

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.block_pages * self.page_size

    @property
    def keys_fill_registers(self) -> bool:
        """Whether scores by columns are whole registers."""
        return self.keys % (32 // self.dtype.itemsize) == 0

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of queries of a tile that share a KV head, group-major."""
        return self.group * self.queries

    @property
    def steps(self) -> int:
        """Grid steps of each core."""
        return -(-self.tokens // (self.queries * self.cores))

    @property
    def tiles(self) -> int:
        """The same number for each core; the last ones may be empty."""
        return self.steps * self.cores

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What the products take: float32 if an operand is, else bfloat16."""
        wide = jnp.dtype(jnp.float32)
        exact = wide in (self.kv_dtype, self.out_dtype)
        return wide if exact else jnp.dtype(jnp.bfloat16)

    def body_heads(self, most: int) -> int:
        """KV heads whose work is interleaved; divides num_kv_heads."""
        if self.dtype == jnp.float32:
            most = 1  # several bfloat16 products each: long enough alone
        return max(n for n in range(1, most + 1) if self.num_kv_heads % n == 0)


def fit(
    q: Any,
    block: KVBlock,
    pages_per_seq: int,
    tuning: Tuning,
    *,
    columns: bool | None,
) -> PrefillShape:
    """The shape of a call; values that the tuning sets are kept."""
    tokens, num_q_heads, head_dim = q.shape
    shape = PrefillShape(
        tokens=tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=block.heads,
        head_dim=head_dim,
        page_size=block.page_size,
        pages_per_seq=pages_per_seq,
        kv_dtype=block.dtype,
        out_dtype=jnp.dtype(q.dtype),
        queries=_queries(num_q_heads // block.heads, tuning),
        block_pages=1,
        columns=chip().wide if columns is None else columns,
        vmem_limit=tuning.vmem_limit_bytes or chip().vmem_limit,
        cores=chip().cores,
        split=not block.planes_as_stored,
    )
    if tuning.num_kv_pages_per_block is not None:
        pages = tuning.num_kv_pages_per_block
        shape = dataclasses.replace(shape, block_pages=pages)
    else:
        may_cut = tuning.num_queries_per_block is None
        shape = _largest(shape, may_cut=may_cut)
    return dataclasses.replace(
        shape, columns=shape.columns and shape.keys_fill_registers
    )


def _largest(shape: PrefillShape, *, may_cut: bool) -> PrefillShape:
    """Blocks of many keys, and tiles of fewer queries if they do not fit."""
    budget = int(shape.vmem_limit * _VMEM_FOR_BUFFERS)
    while may_cut and shape.queries > _MIN_QUERIES:
        # Half the rows cost less than half the keys do.
        keys = _KEYS_PER_BLOCK if shape.rows > _ROWS_PER_TILE // 2 else LANES
        pages = max(1, min(keys // shape.page_size, shape.pages_per_seq))
        if vmem_bytes(dataclasses.replace(shape, block_pages=pages)) <= budget:
            break
        fewer = _whole_lanes(shape.queries // 2, shape.group)
        if fewer >= shape.queries:  # by rows, lanes may stay empty
            if shape.columns:
                break
            fewer = shape.queries // 2
        shape = dataclasses.replace(shape, queries=fewer)
    while (
        shape.keys * 2 <= _KEYS_PER_BLOCK
        and shape.block_pages * 2 <= shape.pages_per_seq
    ):
        larger = dataclasses.replace(shape, block_pages=2 * shape.block_pages)
        if vmem_bytes(larger) > budget:
            break
        shape = larger
    return shape


def _queries(group: int, tuning: Tuning) -> int:
    wanted = tuning.num_queries_per_block or min(
        _ROWS_PER_TILE // group, _MAX_QUERIES
    )
    return _whole_lanes(max(wanted, 1), group)


def _whole_lanes(queries: int, group: int) -> int:
    """The next power of two for which a tile's rows fill whole lanes."""
    queries = max(_MIN_QUERIES, 1 << (queries - 1).bit_length())
    while queries * group % LANES:
        queries *= 2
    return queries


def fit_table(
    entries: int, seqs: int, shape: PrefillShape, tuning: Tuning
) -> PageTable:
    """The page table next to the kernel's other scalar operands."""
    return fit_page_table(
        entries,
        block_pages=shape.block_pages,
        buffers=BUFFERS,
        others=(shape.tiles, shape.tiles, seqs, seqs + 1, 1),
        tuning=tuning,
    )


def vmem_bytes(shape: PrefillShape) -> int:
    """Bytes of VMEM that the kernel takes, tiles padded; an estimate."""
    lanes = -(-shape.head_dim // LANES) * LANES
    item = shape.kv_dtype.itemsize
    page = -(-shape.page_size * item // 32) * 32
    blocks = 4 if shape.split else 2
    kv = blocks * 2 * shape.num_kv_heads * shape.block_pages * page * lanes
    rows = shape.num_kv_heads * shape.rows
    q_and_out = 2 * 2 * rows * lanes * shape.out_dtype.itemsize
    state = rows * 4 * (lanes + (3 * 8 if shape.columns else 2 * LANES))
    logits = 2 * shape.rows * shape.keys * 4
    return kv + q_and_out + state + logits
