"""How keys and values lie in the pages of a KV cache."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pagemill.errors import PagemillError

_LANES = 128
_WORD_BYTES = 4

DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


class KVLayout(enum.Enum):
    """The order of a cache's dimensions; csrc/core/attention/kv_layout.h."""

    INTERLEAVED = "interleaved"
    """[N, page_size, 2 * Hkv, D]: K at even, V at odd combined heads, as jax's
    ragged paged attention takes it."""

    PACKED = "packed"
    """[N, page_size, C / pack, pack, D]: the same combined heads, as
    tpu-inference takes them. ``pack`` elements share 32 bits; C is 2 * Hkv
    rounded up to a multiple of it, D rounded up to 128 lanes."""

    PLANES = "planes"
    """[N, 2, Hkv, page_size, D]: K of all heads, then V, D rounded up to 128
    lanes. The TPU kernels' own: nothing needs to be told apart before it is
    multiplied."""

    @property
    def code(self) -> int:
        """Its number in the native core."""
        return list(KVLayout).index(self)


@dataclasses.dataclass(frozen=True)
class KVCacheSpec:
    """A KV cache: what its array is, and how to fill and read one.

    Attributes:
      total_num_pages: pages.
      page_size: tokens of a page.
      num_kv_heads: heads of K, and of V.
      head_dim: size of a head.
      dtype: of the elements, a name of DTYPES or a numpy dtype.
      layout: how a page's elements are ordered.
      v_head_dim: size of V's heads where it is another than that of K's; the
        array has the larger of the two, and 0 behind the smaller. None stands
        for head_dim.

    Raises:
      PagemillError: a size below 1, or a dtype or layout there is not.
    """

    total_num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: Any = "bfloat16"
    layout: KVLayout = KVLayout.INTERLEAVED
    v_head_dim: int | None = None

    def __post_init__(self) -> None:
        sizes = ["total_num_pages", "page_size", "num_kv_heads", "head_dim"]
        if self.v_head_dim is not None:
            sizes.append("v_head_dim")
        for name in sizes:
            value = getattr(self, name)
            if value < 1:
                raise PagemillError(f"{name}={value} must be at least 1.")
        dtype = np.dtype(self.dtype)
        if dtype.name not in DTYPES:
            raise PagemillError(
                f"dtype={dtype.name} must be one of {', '.join(DTYPES)}."
            )
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "layout", as_layout(self.layout))

    @property
    def _wide_head_dim(self) -> int:
        """That of the array."""
        return max(self.head_dim, self.v_head_dim or 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the cache's array."""
        pages, size = self.total_num_pages, self.page_size
        heads, dim = self.num_kv_heads, self._wide_head_dim
        lanes = -(-dim // _LANES) * _LANES
        if self.layout is KVLayout.PLANES:
            return pages, 2, heads, size, lanes
        if self.layout is KVLayout.INTERLEAVED:
            return pages, size, 2 * heads, dim
        pack = _WORD_BYTES // self.dtype.itemsize
        return pages, size, -(-2 * heads // pack), pack, lanes

    @property
    def nbytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * int(self.dtype.itemsize)

    @property
    def bytes_per_token(self) -> int:
        """Of K and V of all heads, padding included."""
        return self.nbytes // (self.total_num_pages * self.page_size)

    def zeros(self) -> jax.Array:
        """An empty cache."""
        return jnp.zeros(self.shape, self.dtype)

    def pack(self, k: Any, v: Any) -> jax.Array:
        """A cache that holds keys and values of whole pages.

        Args:
          k: [total_num_pages, page_size, num_kv_heads, head_dim].
          v: as k, of v_head_dim.
        """
        k, v = (
            with_lanes(jnp.asarray(x).astype(self.dtype), self._wide_head_dim)
            for x in (k, v)
        )
        if self.layout is KVLayout.PLANES:
            kv = jnp.stack([k, v], axis=1).transpose(0, 1, 3, 2, 4)
            return with_lanes(kv, self.shape[-1])
        return join_heads(k, v, self.shape)

    def unpack(self, kv_pages: Any) -> tuple[jax.Array, jax.Array]:
        """K and V, as pack() takes them."""
        k, v = split_heads(
            jnp.asarray(kv_pages),
            self.layout,
            self.num_kv_heads,
            self._wide_head_dim,
        )
        values = self.v_head_dim or self.head_dim
        return k[..., : self.head_dim], v[..., :values]


def as_layout(layout: Any) -> KVLayout:
    """A layout, or the name of one.

    Raises:
      PagemillError: anything else.
    """
    try:
        return KVLayout(layout)
    except ValueError:
        names = ", ".join(repr(x.value) for x in KVLayout)
        raise PagemillError(
            f"kv_layout={layout!r} must be a pagemill.KVLayout or one of "
            f"{names}."
        ) from None


def page_size_of(kv_pages: Any, layout: KVLayout) -> int:
    """Tokens of a page of an array of that layout."""
    return int(kv_pages.shape[3 if layout is KVLayout.PLANES else 1])


def with_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """Pads the last dimension with 0, where it is smaller."""
    if x.shape[-1] == lanes:
        return x
    padding = [(0, 0)] * (x.ndim - 1)
    return jnp.pad(x, [*padding, (0, lanes - x.shape[-1])])


def join_heads(k: jax.Array, v: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Combined heads of tokens, K at even and V at odd ones, padded with 0.

    Args:
      k: [..., num_kv_heads, head_dim].
      v: as k.
      shape: of INTERLEAVED or PACKED pages, which says how a token's elements
        lie.

    Returns:
      [..., *shape[2:]].
    """
    token = shape[2:]
    heads, dim = 2 * k.shape[-2], k.shape[-1]
    kv = jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], heads, dim)
    rows = math.prod(token[:-1])
    padding = [(0, 0)] * (kv.ndim - 2)
    kv = jnp.pad(kv, [*padding, (0, rows - heads), (0, 0)])
    kv = with_lanes(kv, token[-1])
    return kv.reshape(*k.shape[:-2], *token)


def split_heads(
    kv_pages: jax.Array, layout: KVLayout, num_kv_heads: int, head_dim: int
) -> tuple[jax.Array, jax.Array]:
    """K and V of pages.

    Args:
      kv_pages: pages of a layout.
      layout: theirs.
      num_kv_heads: heads of K.
      head_dim: size of a head, without padding.

    Returns:
      Two of [pages, page_size, num_kv_heads, head_dim].
    """
    if layout is KVLayout.PLANES:
        kv = kv_pages.transpose(1, 0, 3, 2, 4)
        return kv[0, ..., :head_dim], kv[1, ..., :head_dim]
    size, dim = kv_pages.shape[1], kv_pages.shape[-1]
    kv = kv_pages.reshape(kv_pages.shape[0], size, -1, dim)
    kv = kv[:, :, : 2 * num_kv_heads, :head_dim]
    return kv[:, :, 0::2], kv[:, :, 1::2]
