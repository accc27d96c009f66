"""What a kernel's scalar operands take of scalar memory."""

from __future__ import annotations

from collections.abc import Iterable

from pagemill.params import SMEM_BYTES, SMEM_RESERVE

# Scalar operands lie in scalar memory whole, on every generation; the compiler
# keeps a few KiB to itself.
SMEM_LIMIT = min(SMEM_BYTES.values()) - SMEM_RESERVE
# Each scalar operand is rounded up.
_GRANULE = 2**10


def smem_bytes(operands: Iterable[int]) -> int:
    """Bytes of operands of so many int32 entries each."""
    return sum(-(-4 * size // _GRANULE) * _GRANULE for size in operands)
