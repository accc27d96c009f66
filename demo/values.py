"""Reproducible q, k and v of any token, without storing them.

Each number depends on (seed, request, position, kind, lane) alone, so that a
check can make a sequence's keys and values anew, however often its pages were
given away and written again in between.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

KINDS = {"q": 1, "k": 2, "v": 3}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """One attention layer of a small model."""

    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    seed: int = 0

    def heads(self, kind: str) -> int:
        """Heads of q, or of k and v."""
        return self.num_q_heads if kind == "q" else self.num_kv_heads

    def tokens(
        self, kind: str, request: int, begin: int, end: int
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """f32[end - begin, heads, head_dim] of unit variance."""
        heads = self.heads(kind)
        positions = np.arange(begin, end, dtype=np.uint64)[:, None]
        lanes = np.arange(heads * self.head_dim, dtype=np.uint64)[None, :]
        stream = np.uint64((self.seed * 1_000_003 + request) * 4 + KINDS[kind])
        mixed = _mix(
            _mix(positions + (stream << np.uint64(24)))
            + (lanes << np.uint64(1))
        )
        fraction = (mixed >> np.uint64(40)).astype(np.float32)
        uniform = fraction / np.float32(2**24) - np.float32(0.5)
        values = (uniform * np.float32(12**0.5)).astype(np.float32)
        return values.reshape(end - begin, heads, self.head_dim)


def _mix(
    x: np.ndarray[Any, np.dtype[np.uint64]],
) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """A 64-bit finaliser: multiply and shift until all bits depend on all."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xD1B54A32D192ED03)
    return x ^ (x >> np.uint64(32))
