"""A block of KV pages in VMEM, and K and V of a head in it.

Pages of KVLayout.PLANES lie as the products take them. In the other layouts a
token's heads are adjacent rows, K and V in turn: such a block is split into
planes once, before it is computed. For 16-bit types two such rows share a row
of 32-bit words, K in the low half: a word's halves, widened to float32, are K
and V exactly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kv_cache import KVLayout, page_size_of
from pagemill.params import AttentionParams

_LANES = 128


@dataclasses.dataclass(frozen=True)
class KVBlock:
    """The layout of a block of pages.

    Attributes:
      layout: of the cache.
      pages: of the block.
      page_size: tokens of a page.
      heads: of K, and of V.
      head_dim: size of a head.
      dtype: of the cache.
      rows: of a token, two per head and padding; 0 in KVLayout.PLANES.
      lanes: elements of a row, head_dim and padding.
    """

    layout: KVLayout
    pages: int
    page_size: int
    heads: int
    head_dim: int
    dtype: np.dtype[np.generic]
    rows: int
    lanes: int

    @property
    def planes_as_stored(self) -> bool:
        """Nothing needs to be split."""
        return self.layout is KVLayout.PLANES

    @property
    def keys(self) -> int:
        """Tokens of the block."""
        return self.pages * self.page_size

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Of a page in HBM as in VMEM, see view()."""
        if self.planes_as_stored:
            return 2, self.heads, self.page_size, self.head_dim
        return self.page_size * self.rows, self.lanes

    def view(self, kv_pages: Any) -> Any:
        """The cache with pages of page_shape."""
        return kv_pages.reshape(kv_pages.shape[0], *self.page_shape)

    def buffers(self, count: int) -> Any:
        """Scratch for blocks on their way."""
        return pltpu.VMEM((count, *self._block_shape), self.dtype)

    @property
    def _block_shape(self) -> tuple[int, ...]:
        if self.planes_as_stored:
            return self.pages, *self.page_shape
        return self.pages * self.page_shape[0], self.lanes

    def page(self, kv: Any, buffer: Any, i: Any) -> Any:
        """Where the i-th page of a buffer goes."""
        if self.planes_as_stored:
            return kv.at[buffer, i]
        rows = self.page_shape[0]
        return kv.at[buffer, pl.ds(pl.multiple_of(i * rows, rows), rows)]

    @property
    def split_scratch(self) -> tuple[Any, Any]:
        """Scratch for planes, and for a block's words; tiny where unused."""
        if self.planes_as_stored:
            unused = pltpu.VMEM((8, _LANES), jnp.float32)
            return unused, unused
        chunks = self.lanes // _LANES if self.lanes > _LANES else 1
        words = self.keys * self.rows * self.dtype.itemsize // 4
        width = min(self.lanes, _LANES)
        planes = (2, self.heads, self.keys, self.head_dim)
        return (
            pltpu.VMEM(planes, self.dtype),
            pltpu.VMEM((chunks, words, width), jnp.uint32),
        )

    def split(self, kv: Any, buffer: Any, planes: Any, words: Any) -> None:
        """Fills the planes from a buffer, if they are not as stored."""
        if self.planes_as_stored:
            return
        width = words.shape[-1]
        packed = pltpu.bitcast(kv[buffer], jnp.uint32)
        for i in range(words.shape[0]):
            words[i] = packed[:, i * width : (i + 1) * width]
        for head in range(self.heads):
            k, v = self._split_head(words, head)
            planes[0, head] = k[:, : self.head_dim]
            planes[1, head] = v[:, : self.head_dim]

    def _split_head(self, words: Any, head: int) -> tuple[Any, Any]:
        if self.dtype.itemsize == 4:
            k, v = (self._strided(words, 2 * head + i, 1) for i in (0, 1))
            return pltpu.bitcast(k, self.dtype), pltpu.bitcast(v, self.dtype)
        both = self._strided(words, head, 2)
        low = pltpu.bitcast(both << 16, jnp.float32)
        high = pltpu.bitcast(both & jnp.uint32(0xFFFF0000), jnp.float32)
        return low.astype(self.dtype), high.astype(self.dtype)

    def _strided(self, words: Any, start: int, packing: int) -> Any:
        stride = self.rows // packing
        parts = [
            words[i, pl.ds(start, self.keys, stride)]
            for i in range(words.shape[0])
        ]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)

    def plane(
        self,
        kv: Any,
        buffer: Any,
        planes: Any,
        which: int,
        head: Any,
        pages: int,
    ) -> Any:
        """K (0) or V (1) of a head in the block's first pages: [keys, D]."""
        keys = pages * self.page_size
        if not self.planes_as_stored:
            return planes[which, head, pl.ds(0, keys)]
        x = kv[buffer, pl.ds(0, pages), which, head]
        return x.reshape(keys, self.head_dim)


def kv_block(
    kv_pages: Any, params: AttentionParams, *, head_dim: int, pages: int = 1
) -> KVBlock:
    """A block of a cache's pages.

    Args:
      kv_pages: the cache's array.
      params: its layout, and its heads where its shape does not tell.
      head_dim: size of a head.
      pages: of the block.
    """
    shape, layout = kv_pages.shape, params.kv_layout
    planes = layout is KVLayout.PLANES
    rows = 0 if planes else int(np.prod(shape[2:-1]))
    heads = shape[2] if planes else rows // 2
    return KVBlock(
        layout=layout,
        pages=pages,
        page_size=page_size_of(kv_pages, layout),
        heads=params.num_kv_heads or heads,
        head_dim=head_dim,
        dtype=jnp.dtype(kv_pages.dtype),
        rows=rows,
        lanes=shape[-1],
    )
