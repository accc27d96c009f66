"""The page table: whole in scalar memory, or streamed by windows from HBM.

A table that fits is prefetched with the other scalars. A larger one stays in
HBM as rows of 128 entries, and a block's entries come by one small copy while
the block before is computed. Each buffer of pages has its window, so that a
window is read before it is needed again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common.scalar_memory import SMEM_LIMIT, smem_bytes
from pagemill.params import Tuning

_LANES = 128
_LANE_BITS = 7  # of a lane's number


@dataclasses.dataclass(frozen=True)
class PageTable:
    """How a kernel reads page_indices.

    Attributes:
      entries: of page_indices.
      block_pages: entries read at a time.
      buffers: of blocks, each with its window.
      streamed: whether the table stays in HBM.
      others: entries of the kernel's other scalar operands.
    """

    entries: int
    block_pages: int
    buffers: int
    streamed: bool
    others: tuple[int, ...]

    @property
    def window_rows(self) -> int:
        """Rows that hold a block's entries, wherever they begin."""
        return (self.block_pages + _LANES - 2) // _LANES + 1

    @property
    def scalar_operands(self) -> int:
        """Of the kernel: 1 if the table is one."""
        return 0 if self.streamed else 1

    @property
    def smem_bytes(self) -> int:
        """Scalar memory of all metadata."""
        windows = self.buffers * self.window_rows * _LANES
        mine = windows if self.streamed else self.entries
        return smem_bytes((*self.others, mine))

    @property
    def in_specs(self) -> list[Any]:
        """Of the operand, where it is not a scalar one."""
        return [pl.BlockSpec(memory_space=pl.ANY)] if self.streamed else []

    @property
    def scratch(self) -> list[Any]:
        """Windows, and a DMA semaphore for each."""
        if not self.streamed:
            return []
        windows = (self.buffers, self.window_rows, _LANES)
        return [
            pltpu.SMEM(windows, jnp.int32),
            pltpu.SemaphoreType.DMA((self.buffers,)),
        ]

    def operand(self, page_indices: jax.Array) -> jax.Array:
        """What the kernel takes for i32[entries]."""
        if not self.streamed:
            return page_indices
        # A window may reach past the last entry.
        rows = -(-self.entries // _LANES) + self.window_rows - 1
        padding = rows * _LANES - self.entries
        return jnp.pad(page_indices, (0, padding)).reshape(rows, _LANES)

    def start(self, r: Any, buffer: Any, entry: Any) -> None:
        """A buffer's window on its way: of entries from `entry` on."""
        if self.streamed:
            self._copy(r, buffer, lax.div(entry, jnp.int32(_LANES))).start()

    def wait(self, r: Any, buffer: Any) -> None:
        """For a buffer's window, once."""
        if self.streamed:
            self._copy(r, buffer, 0).wait()

    def _copy(self, r: Any, buffer: Any, row: Any) -> Any:
        return pltpu.make_async_copy(
            r.page_indices.at[pl.ds(row, self.window_rows)],
            r.windows.at[buffer],
            r.window_arrived.at[buffer],
        )

    def page(
        self, r: Any, buffer: Any, entry: Any, i: Any, after: Any = 0
    ) -> Any:
        """The page at `entry` + `after` + `i`, in the window of `entry`."""
        if not self.streamed:
            return r.page_indices[entry + after + i]
        place = (entry & (_LANES - 1)) + after + i
        row = lax.shift_right_logical(place, jnp.int32(_LANE_BITS))
        return r.windows[buffer, row, place & (_LANES - 1)]


def fit_page_table(
    entries: int,
    *,
    block_pages: int,
    buffers: int,
    others: tuple[int, ...],
    tuning: Tuning,
) -> PageTable:
    """Streamed if it does not fit, unless the tuning says otherwise.

    Args:
      entries: of page_indices.
      block_pages: pages of a block.
      buffers: of blocks.
      others: entries of the kernel's other scalar operands.
      tuning: may say otherwise.
    """
    streamed = tuning.stream_page_table
    table = PageTable(entries, block_pages, buffers, bool(streamed), others)
    if streamed is None and table.smem_bytes > SMEM_LIMIT:
        return dataclasses.replace(table, streamed=True)
    return table
