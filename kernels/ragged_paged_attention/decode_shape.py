"""Static numbers of the decode kernel, and how it cuts its work."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from pagemill.kernels.common.kv_block import KVBlock
from pagemill.kernels.common.page_table import PageTable, fit_page_table
from pagemill.params import Tuning

LANES = 128
# Rows of queries that share a matmul: as many as a 16-bit register holds.
_ROWS_PER_DOT = 16
BUFFERS = 3  # of blocks
# Buffers of keys and values together; well below the 16 MiB that the compiler
# grants by default where that is least.
_BUFFER_BYTES = 10 * 2**20
_KEYS_PER_BLOCK = 512
_PARTS_PER_STEP = 8
# With fewer sequences per core, the cores' shares would be too uneven.
_FEW_SEQS_PER_CORE = 4
_KEYS_PER_TIER = 128


@dataclasses.dataclass(frozen=True)
class DecodeShape:
    """What the kernel's code and buffers depend on.

    Attributes:
      seqs, queries, num_q_heads, num_kv_heads, head_dim, page_size,
        pages_per_seq: of the operands.
      kv_dtype, out_dtype: of the cache, and of queries and output.
      block_pages: pages fetched and computed at a time.
      buffers: blocks in flight or in use.
      parts_per_step: parts of a grid step.
      cores: TensorCores that share the grid.
      splits: parts of a sequence's keys, each attended on its own.
      fp8: the MXU takes keys and values of that type.
    """

    seqs: int
    queries: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    pages_per_seq: int
    kv_dtype: np.dtype[np.generic]
    out_dtype: np.dtype[np.generic]
    block_pages: int
    buffers: int = BUFFERS
    parts_per_step: int = _PARTS_PER_STEP
    cores: int = 1
    splits: int = 1
    fp8: bool = True

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.block_pages * self.page_size

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What the products take: float32 if an operand is, else bfloat16."""
        wide = jnp.dtype(jnp.float32)
        exact = wide in (self.kv_dtype, self.out_dtype)
        return wide if exact else jnp.dtype(jnp.bfloat16)

    @property
    def result_dtype(self) -> np.dtype[np.generic]:
        """Of the kernel's output: parts are rounded once they are merged."""
        return self.out_dtype if self.splits == 1 else jnp.dtype(jnp.float32)

    @property
    def head_rows(self) -> int:
        """Rows of queries that share a KV head, group-major."""
        return self.num_q_heads // self.num_kv_heads * self.queries

    @property
    def dot_heads(self) -> int:
        """KV heads whose rows share a matmul; divides num_kv_heads."""
        return max(
            n
            for n in range(1, self.num_kv_heads + 1)
            if self.num_kv_heads % n == 0
            and (n == 1 or n * self.head_rows <= _ROWS_PER_DOT)
        )

    @property
    def dots(self) -> int:
        """Matmuls for all heads."""
        return self.num_kv_heads // self.dot_heads

    @property
    def dot_rows(self) -> int:
        """Rows of a matmul, padded to whole registers."""
        tile = 32 // self.dtype.itemsize
        return -(-self.dot_heads * self.head_rows // tile) * tile

    @property
    def parts(self) -> int:
        """Of all sequences; dealt to the cores in turn."""
        return self.seqs * self.splits

    @property
    def parts_per_core(self) -> int:
        """Parts of the core that has most."""
        return -(-self.parts // self.cores)

    @property
    def steps(self) -> int:
        """Grid steps of each core."""
        return -(-self.parts_per_core // self.parts_per_step)

    @property
    def tiers(self) -> tuple[int, ...]:
        """Pages that a block's last, shorter part is rounded up to."""
        sizes, pages = [self.block_pages], self.block_pages
        while pages % 2 == 0 and pages * self.page_size > _KEYS_PER_TIER:
            pages //= 2
            sizes.append(pages)
        return tuple(reversed(sizes))


def fit_block_pages(block: KVBlock, pages_per_seq: int, tuning: Tuning) -> int:
    """Pages of a block: a power of two, unless the tuning says otherwise."""
    if tuning.num_kv_pages_per_block is not None:
        return tuning.num_kv_pages_per_block
    keys = _KEYS_PER_BLOCK * max(1, 2 // block.dtype.itemsize)
    pages = 1
    while (
        pages * 2 * block.page_size <= keys
        and buffer_bytes(block, pages * 2) <= _BUFFER_BYTES
        and pages * 2 <= pages_per_seq
    ):
        pages *= 2
    return pages


def fit_splits(
    block: KVBlock, seqs: int, pages_per_seq: int, cores: int, tuning: Tuning
) -> int:
    """Parts of a sequence: as many as cores, where few long ones are left.

    Args:
      block: of the pages of a block.
      seqs: sequences that a batch has room for.
      pages_per_seq: pages that a sequence has room for.
      cores: that share the work.
      tuning: may say otherwise.
    """
    if tuning.num_kv_splits is not None:
        return tuning.num_kv_splits
    few = seqs < _FEW_SEQS_PER_CORE * cores
    long = pages_per_seq > cores * block.pages
    return cores if few and long else 1


def fit_table(
    entries: int,
    seqs: int,
    tree_words: int,
    *,
    block_pages: int,
    tuning: Tuning,
) -> PageTable:
    """The page table next to the kernel's other scalar operands."""
    return fit_page_table(
        entries,
        block_pages=block_pages,
        buffers=BUFFERS,
        others=(seqs, seqs, 1, tree_words),
        tuning=tuning,
    )


def buffer_bytes(block: KVBlock, pages: int) -> int:
    """Bytes of VMEM for blocks of so many pages, tiles padded; an estimate."""
    lanes = -(-block.head_dim // LANES) * LANES
    page = 2 * block.heads * block.page_size * lanes * block.dtype.itemsize
    # To split a block into planes takes as much as two more.
    buffers = BUFFERS + (0 if block.planes_as_stored else 2)
    return pages * page * buffers
