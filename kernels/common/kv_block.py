"""A block of KV pages in VMEM, and K and V of a head in it.

Pages of KVLayout.PLANES lie as the products take them. In the other layouts a
token's heads are adjacent rows, K and V in turn: such a block is split into
planes once, before it is computed. Only rows of 32-bit words can be loaded with
a stride. Rows of narrower types share them, the first in the low bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
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
      rows: of a token, two per head and padding to whole words; 0 in
        KVLayout.PLANES.
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
        pages = kv_pages.shape[0]
        if not self.planes_as_stored:
            shape = pages, self.page_size, -1, self.lanes
            kv_pages = kv_pages.reshape(shape)
            padding = self.rows - kv_pages.shape[2]
            if padding:
                widths = ((0, 0), (0, 0), (0, padding), (0, 0))
                kv_pages = jnp.pad(kv_pages, widths)
        return kv_pages.reshape(pages, *self.page_shape)

    def buffers(self, count: int) -> Any:
        """Scratch for blocks on their way."""
        return pltpu.VMEM((count, *self._block_shape), self.dtype)

    @property
    def _block_shape(self) -> tuple[int, ...]:
        if self.planes_as_stored:
            return self.pages, *self.page_shape
        return self.keys * self.rows, self.lanes

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
        planes = (2, self.heads, self.keys, self.head_dim)
        chunks = -(-self.lanes // _LANES)
        words = self.keys * self.rows // self._packing
        return (
            pltpu.VMEM(planes, self.dtype),
            pltpu.VMEM((chunks, words, min(self.lanes, _LANES)), jnp.uint32),
        )

    @property
    def _packing(self) -> int:
        """Elements of a word."""
        return 4 // self.dtype.itemsize

    def split(self, kv: Any, buffer: Any, planes: Any, words: Any) -> None:
        """Fills the planes from a buffer, if they are not as stored."""
        if self.planes_as_stored:
            return
        packed = pltpu.bitcast(kv[buffer], jnp.uint32)
        for chunk, start in enumerate(range(0, self.lanes, _LANES)):
            part = packed[:, start : start + _LANES]
            words[chunk, :, : part.shape[1]] = part
        for chunk, start in enumerate(range(0, self.head_dim, _LANES)):
            lanes = pl.ds(start, min(_LANES, self.head_dim - start))
            rows = self._rows(words, chunk)
            for row, x in zip(range(2 * self.heads), rows, strict=False):
                head, which = divmod(row, 2)
                planes[which, head, :, lanes] = x[:, : lanes.size]

    def _rows(self, words: Any, chunk: int) -> Iterator[Any]:
        """One row of every token after the other: [keys, chunk's lanes]."""
        stride = self.rows // self._packing
        for word in range(stride):
            x = words[chunk, pl.ds(word, self.keys, stride)]
            for place in range(self._packing):
                yield self._element(x, place)

    def _element(self, words: Any, place: int) -> Any:
        """What lies at a place of words, 0 the lowest."""
        if self._packing == 4:
            words = (words >> jnp.uint32(8 * place)).astype(jnp.int8)
        elif self._packing == 2:
            high = words & jnp.uint32(0xFFFF0000)
            wide = pltpu.bitcast(high if place else words << 16, jnp.float32)
            # Exact; int16 would fill registers by half only.
            return wide.astype(self.dtype)
        return pltpu.bitcast(words, self.dtype)

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
    stored = 0 if planes else int(np.prod(shape[2:-1]))
    heads = shape[2] if planes else stored // 2
    page_size = page_size_of(kv_pages, layout)
    return KVBlock(
        layout=layout,
        pages=pages,
        page_size=page_size,
        heads=params.num_kv_heads or heads,
        head_dim=head_dim,
        dtype=jnp.dtype(kv_pages.dtype),
        rows=_rows(stored, page_size, shape[-1], kv_pages.dtype.itemsize),
        lanes=shape[-1],
    )


def _rows(stored: int, page_size: int, lanes: int, itemsize: int) -> int:
    """A token's rows, padded to whole words."""
    packing = 4 // itemsize
    rows = -(-stored // packing) * packing
    if lanes <= _LANES:
        return rows
    # Of rows of several registers, copies begin at whole tiles.
    tile = 32 if packing == 4 else 8
    while page_size * rows % tile and tile % max(page_size * rows, 1):
        rows += packing
    return rows
