"""A step's arrays on a device: one transfer, or only what changed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagemill.batch import ARRAYS, RaggedBatch
from pagemill.errors import PagemillError

_SMALLEST_DELTA = 32


def unpack(
    blob: jax.Array, batch: RaggedBatch, offsets: dict[str, int]
) -> dict[str, jax.Array]:
    """A batch's arrays out of the blob that holds them; one program a bucket.

    Args:
      blob: i32[n], on the device.
      batch: says the shapes.
      offsets: where each array begins; those past the blob are left out.

    Returns:
      The arrays by name, none of which shares memory with the blob.
    """
    pieces = tuple(
        (name, offsets[name], tuple(getattr(batch, name).shape))
        for name in ARRAYS
        if offsets[name] < blob.shape[0]
    )
    return _unpack(blob, pieces)


@functools.partial(jax.jit, static_argnums=1)
def _unpack(
    blob: jax.Array, pieces: tuple[tuple[str, int, tuple[int, ...]], ...]
) -> dict[str, jax.Array]:
    return {
        name: blob[offset : offset + int(np.prod(shape))].reshape(shape)
        for name, offset, shape in pieces
    }


def make_batch(
    like: RaggedBatch, arrays: dict[str, jax.Array], pages: Any
) -> RaggedBatch:
    """A batch of the same capacities from arrays on a device."""
    leaves = [
        pages if name == "page_indices" and pages is not None else arrays[name]
        for name in ARRAYS
    ]
    statics = (like.page_size, like.total_num_pages, like.max_num_tokens)
    return RaggedBatch.tree_unflatten(statics, leaves)


class DeviceTable:
    """A page table on a device, kept up to date by what changed.

    Updates are scattered into donated memory, so that a step moves bytes for
    the pages that it took and no more. Their number is padded to powers of two:
    a stream of steps compiles few programs.

    Args:
      max_num_seqs: rows.
      pages_per_seq: columns.
      sharding: where it lies; the default device when None.
    """

    def __init__(
        self, max_num_seqs: int, pages_per_seq: int, sharding: Any = None
    ) -> None:
        if min(max_num_seqs, pages_per_seq) < 1:
            raise PagemillError(
                f"max_num_seqs={max_num_seqs} and "
                f"pages_per_seq={pages_per_seq} must be at least 1. Pass the "
                "planner's."
            )
        self._table = jax.device_put(
            jnp.zeros((max_num_seqs, pages_per_seq), jnp.int32), sharding
        )

    @property
    def table(self) -> jax.Array:
        """i32[max_num_seqs, pages_per_seq]; donated to the next update."""
        return self._table

    def update(self, indices: Any, pages: Any) -> jax.Array:
        """Sets ``table.ravel()[indices] = pages``; returns the table.

        Apply the deltas of all steps, in their order.
        """
        if len(indices):
            size = max(_SMALLEST_DELTA, 1 << (len(indices) - 1).bit_length())
            delta = np.full((2, size), self._table.size, np.int32)
            delta[0, : len(indices)] = indices
            delta[1, : len(pages)] = pages
            self._table = _scatter(self._table, delta)
        return self._table

    def copy_rows(self, rows: int) -> jax.Array:
        """i32[rows, pages_per_seq]: the first ones, which no update takes."""
        if rows == self._table.shape[0]:
            return jnp.copy(self._table)  # a slice would be the table itself
        return self._table[:rows]


@functools.partial(jax.jit, donate_argnums=0)
def _scatter(table: jax.Array, delta: jax.Array) -> jax.Array:
    flat = table.reshape(-1).at[delta[0]].set(delta[1], mode="drop")
    return flat.reshape(table.shape)
