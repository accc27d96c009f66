"""How the prefill kernel cuts its work, by shape and TPU generation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from pagemill.params import Tuning

LANES = 128
_ROWS_PER_TILE = 512  # of queries that share a KV head
_MIN_QUERIES, _MAX_QUERIES = 16, 256
_KEYS_PER_BLOCK = 512
_HEADS_PER_BODY = 8  # KV heads whose work is interleaved
_VMEM_BUDGET = 14 * 2**20  # of the 16 MiB that every generation grants
_WIDE_MXU = 6  # generations from here on multiply 256 x 256 matrices


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
    cores: int = 1

    @property
    def keys(self) -> int:
        """Keys of a block."""
        return self.block_pages * self.page_size

    @property
    def group(self) -> int:
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Rows of queries of a tile that share a KV head, group-major."""
        return self.group * self.queries

    @property
    def tiles(self) -> int:
        return -(-self.tokens // self.queries)

    @property
    def steps(self) -> int:
        """Grid steps of each core."""
        return -(-self.tiles // self.cores)

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """What the products take: float32 if an operand is, else bfloat16."""
        wide = jnp.dtype(jnp.float32)
        exact = wide in (self.kv_dtype, self.out_dtype)
        return wide if exact else jnp.dtype(jnp.bfloat16)

    @property
    def body_heads(self) -> int:
        """KV heads whose work is interleaved; divides num_kv_heads."""
        return max(
            n
            for n in range(1, _HEADS_PER_BODY + 1)
            if self.num_kv_heads % n == 0
        )


def columns_by_default() -> bool:
    """Whether the TPU that is lowered for fills its MXU better by columns.

    The device is that of the abstract mesh, under which one lowers ahead of
    time, else the default one; where neither is a TPU, the newest is assumed.
    """
    try:
        return pltpu.get_tpu_info().generation >= _WIDE_MXU
    except ValueError:
        return True


def fit(
    q: Any,
    kv_pages: Any,
    pages_per_seq: int,
    tuning: Tuning,
    *,
    columns: bool | None,
) -> PrefillShape:
    """The shape of a call; values that the tuning sets are kept."""
    tokens, num_q_heads, head_dim = q.shape
    _, _, num_kv_heads, page_size, _ = kv_pages.shape
    shape = PrefillShape(
        tokens=tokens,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        pages_per_seq=pages_per_seq,
        kv_dtype=jnp.dtype(kv_pages.dtype),
        out_dtype=jnp.dtype(q.dtype),
        queries=_queries(num_q_heads // num_kv_heads, tuning),
        block_pages=1,
        columns=columns_by_default() if columns is None else columns,
    )
    if tuning.num_kv_pages_per_block is not None:
        pages = tuning.num_kv_pages_per_block
        return dataclasses.replace(shape, block_pages=pages)
    budget = tuning.vmem_limit_bytes or _VMEM_BUDGET
    while (
        shape.keys * 2 <= _KEYS_PER_BLOCK
        and shape.block_pages < pages_per_seq
    ):
        larger = dataclasses.replace(shape, block_pages=2 * shape.block_pages)
        if vmem_bytes(larger) > budget:
            break
        shape = larger
    return shape


def _queries(group: int, tuning: Tuning) -> int:
    """A power of two, such that a tile's rows fill whole lanes."""
    wanted = tuning.num_queries_per_block or max(
        LANES, min(_ROWS_PER_TILE // group, _MAX_QUERIES)
    )
    queries = max(_MIN_QUERIES, 1 << (wanted - 1).bit_length())
    while queries * group % LANES:
        queries *= 2
    return queries


def vmem_bytes(shape: PrefillShape) -> int:
    """Bytes of VMEM that the kernel takes, tiles padded; an estimate."""
    lanes = -(-shape.head_dim // LANES) * LANES
    item = shape.kv_dtype.itemsize
    page = -(-shape.page_size * item // 32) * 32
    kv = 2 * 2 * shape.num_kv_heads * shape.block_pages * page * lanes
    rows = shape.num_kv_heads * shape.rows
    q_and_out = 2 * 2 * rows * lanes * shape.out_dtype.itemsize
    state = rows * 4 * (lanes + (3 * 8 if shape.columns else 2 * LANES))
    logits = 2 * shape.rows * shape.keys * 4
    return kv + q_and_out + state + logits
