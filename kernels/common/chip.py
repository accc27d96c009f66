"""What kernels depend on of the TPU that they are lowered for."""

from __future__ import annotations

import dataclasses

from jax.experimental.pallas import tpu as pltpu

_LANES = 128
# The best blocks take up to 17 MiB, spilled registers included; the compiler
# grants 16 by default on some generations. All but v4 have 64 at least.
_VMEM_LIMIT = 32 * 2**20
_FIRST_WITH_FP8 = 5


@dataclasses.dataclass(frozen=True)
class Chip:
    """Of a TPU generation.

    Attributes:
      wide: its MXU has twice as many columns as a register has lanes.
      cores: that share a kernel.
      vmem_limit: bytes that a kernel asks for.
      takes_fp8: its MXU does, as keys and values.
    """

    wide: bool
    cores: int
    vmem_limit: int
    takes_fp8: bool


def chip() -> Chip:
    """The TPU that is lowered for.

    That of the abstract mesh, under which one lowers ahead of time, else the
    default device; where neither is a TPU, as in the interpreter, the newest.
    """
    try:
        info = pltpu.get_tpu_info()
    except ValueError:
        return Chip(wide=True, cores=1, vmem_limit=_VMEM_LIMIT, takes_fp8=True)
    return Chip(
        wide=info.mxu_column_size >= 2 * _LANES,
        cores=info.num_cores,
        vmem_limit=min(_VMEM_LIMIT, info.vmem_capacity_bytes),
        takes_fp8=info.generation >= _FIRST_WITH_FP8,
    )
