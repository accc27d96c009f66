"""What the figures are compared with: each TPU generation's rates.

HBM and bfloat16 rates are the datasheets', per chip. A clock makes
``bf16 = 2 * MACs per cycle * clock * TensorCores`` hold; for v6e and 7x it
follows from that equation. The compiler's model of v4 was never calibrated.
"""

from __future__ import annotations

import dataclasses

from pagemill.inspect.errors import UnknownTpuError

# LHS rows that one matmul instruction takes, by element type.
_ROWS = {"f32": 8, "bf16": 16}
_ROWS_8_BIT = 32
_ROWS_UNKNOWN = 16


@dataclasses.dataclass(frozen=True)
class Generation:
    """One TPU generation; rates are of one TensorCore unless said.

    Attributes:
      name: as analyse takes it.
      topology: what libtpu calls the smallest slice of it.
      device_kind: what JAX calls a device of it.
      device_cores: TensorCores that JAX joins into one device.
      cores: TensorCores of a chip.
      mxus: matrix units.
      mxu_width: rows and columns of one.
      rows_per_cycle: LHS rows that one MXU takes a cycle.
      ghz: the clock.
      hbm_gbs: HBM rate of the chip, GB/s.
      fast_8_bit: whether an MXU takes 8-bit rows at twice the rate.
      simulates: whether libtpu's simulator survives it.
    """

    name: str
    topology: str
    device_kind: str
    cores: int
    mxus: int
    mxu_width: int
    rows_per_cycle: int
    ghz: float
    hbm_gbs: float
    device_cores: int = 1
    fast_8_bit: bool = False
    simulates: bool = True

    @property
    def macs_per_cycle(self) -> int:
        """Peak bfloat16 multiply-accumulates a cycle."""
        return self.mxus * self.mxu_width**2 * self.rows_per_cycle

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """Its share of the chip's HBM rate."""
        return self.hbm_gbs / self.cores / self.ghz

    def matmul_cycles(self, dtype: str) -> float:
        """Cycles that one matmul instruction occupies one MXU."""
        rows = _ROWS.get(dtype, _ROWS_8_BIT)
        if dtype == "?":
            rows = _ROWS_UNKNOWN
        twice = self.fast_8_bit and rows == _ROWS_8_BIT
        return rows / self.rows_per_cycle / (2 if twice else 1)


GENERATIONS = {
    made.name: made
    for made in (
        Generation(
            "v4", "v4:2x2x1", "TPU v4", 2, 4, 128, 1, 1.05, 1228,
            simulates=False,
        ),
        Generation("v5e", "v5e:2x2", "TPU v5 lite", 1, 4, 128, 1, 1.50, 819),
        Generation(
            "v5p", "v5p:2x2x1", "TPU v5", 2, 4, 128, 1, 1.75, 2765,
            device_cores=2,
        ),
        Generation("v6e", "v6e:2x2", "TPU v6 lite", 1, 2, 256, 2, 1.75, 1640),
        Generation(
            "7x", "tpu7x:2x2x1", "TPU7x", 2, 2, 256, 2, 2.20, 7380,
            fast_8_bit=True,
        ),
    )
}  # fmt: skip


def generation(name: str) -> Generation:
    """Of that name; UnknownTpuError if there is none."""
    found = GENERATIONS.get(name.removeprefix("tpu"))
    if found is None:
        raise UnknownTpuError(
            f"tpu={name!r} is no TPU generation that libtpu compiles for. "
            f"Use one of {', '.join(GENERATIONS)}."
        )
    return found
