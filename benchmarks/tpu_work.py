"""Workloads that kernels are compiled and simulated for.

Heads as in Llama 3 8B: 32 query heads, 8 KV heads, head_dim 128. Spec functions
of every kernel take a workload's fields, and name two figures of their own:

    loop_kv    KV tokens that one pass of the multiplying loop attends to
    loop_macs  useful multiply-accumulates of one such pass (prefill)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An operand."""
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """An operand of int32."""
    return shaped(*shape, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Work:
    """Sequences that are alike, or of lengths in a range.

    Attributes:
      seqs: how many.
      q_len: query tokens of each; 1 is decode.
      kv_len: KV tokens of each, or of the longest.
      kv_least: of the shortest; None when all are alike.
      page_size: tokens of a page.
      kv_dtype: of the cache.
    """

    seqs: int
    q_len: int = 1
    kv_len: int = 2048
    kv_least: int | None = None
    page_size: int = 128
    kv_dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Query tokens of all."""
        return self.seqs * self.q_len

    @property
    def pages_per_seq(self) -> int:
        """Slots of a page table's row."""
        return -(-self.kv_len // self.page_size)

    @property
    def total_num_pages(self) -> int:
        """Each sequence has pages of its own."""
        return self.seqs * self.pages_per_seq

    def length(self, seq: Any) -> Any:
        """KV tokens of a sequence; an expression of scalars."""
        if self.kv_least is None:
            return self.kv_len
        spread = jnp.int32(self.kv_len - self.kv_least + 1)
        return lax.rem(jnp.int32(seq) * 61, spread) + self.kv_least

    @property
    def kv_bytes(self) -> float:
        """Bytes of K and V that cross HBM, for sequences that are alike."""
        size = jnp.dtype(self.kv_dtype).itemsize
        return 2 * size * self.seqs * self.kv_len * KV_HEADS * HEAD_DIM


def block_macs(queries: int, keys: int) -> int:
    """Useful work of QK and PV for a block, over all heads."""
    return 2 * queries * keys * Q_HEADS * HEAD_DIM
