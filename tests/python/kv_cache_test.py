"""KV layouts: shapes, bytes, and what goes in comes out."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pagemill import KVCacheSpec, KVLayout, PagemillError
from pagemill.kernels.ragged_paged_attention import update

SHAPES = {
    KVLayout.INTERLEAVED: (6, 4, 6, 80),
    KVLayout.PACKED: (6, 4, 3, 2, 128),
    KVLayout.PLANES: (6, 2, 3, 4, 128),
}


def spec(layout: KVLayout, dtype: Any = "bfloat16") -> KVCacheSpec:
    return KVCacheSpec(6, 4, 3, 80, dtype, layout)


def tokens(dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    k, v = 20 * rng.standard_normal((2, 6, 4, 3, 80))
    return k.astype(dtype), v.astype(dtype)


@pytest.mark.parametrize("layout", list(KVLayout))
def test_shapes(layout: KVLayout) -> None:
    made = spec(layout)
    assert made.shape == SHAPES[layout]
    assert made.zeros().shape == made.shape
    assert made.zeros().dtype == jnp.bfloat16
    lanes = 80 if layout is KVLayout.INTERLEAVED else 128
    assert made.bytes_per_token == 2 * 3 * lanes * 2
    assert made.nbytes == 6 * 4 * made.bytes_per_token


def test_packed_eight_bits_fill_words() -> None:
    assert spec(KVLayout.PACKED, "int8").shape == (6, 4, 2, 4, 128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_round_trip(layout: KVLayout, dtype: str) -> None:
    k, v = tokens(jnp.dtype(dtype))
    made = spec(layout, dtype)
    packed = made.pack(k, v)
    assert packed.shape == made.shape
    for found, given in zip(made.unpack(packed), (k, v), strict=True):
        np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 80)])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_values_of_another_size(
    layout: KVLayout, head_dim: int, v_head_dim: int
) -> None:
    """The array is as wide as the wider, and 0 behind the narrower."""
    rng = np.random.default_rng(0)
    k, v = (
        rng.standard_normal((6, 4, 3, dim)).astype(jnp.bfloat16)
        for dim in (head_dim, v_head_dim)
    )
    wide = max(head_dim, v_head_dim)
    made = KVCacheSpec(6, 4, 3, head_dim, "bfloat16", layout, v_head_dim)
    both = KVCacheSpec(6, 4, 3, wide, "bfloat16", layout)
    assert made.shape == both.shape
    packed = made.pack(k, v)
    for found, given in zip(made.unpack(packed), (k, v), strict=True):
        np.testing.assert_array_equal(found, given)
    for found, given in zip(both.unpack(packed), (k, v), strict=True):
        dim = given.shape[-1]
        np.testing.assert_array_equal(found[..., :dim], given)
        assert not np.asarray(found[..., dim:]).any()


@pytest.mark.parametrize("layout", list(KVLayout))
def test_updates_go_where_pack_puts_them(layout: KVLayout) -> None:
    k, v = tokens()
    made = spec(layout)
    slots = jnp.arange(24, dtype=jnp.int32)[::-1]
    written = update.update_kv_pages(
        made.zeros(),
        jnp.asarray(k).reshape(24, 3, 80)[::-1],
        jnp.asarray(v).reshape(24, 3, 80)[::-1],
        slots,
        layout=layout,
    )
    np.testing.assert_array_equal(written, made.pack(k, v))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"v_head_dim": 0}, "v_head_dim=0 must be at least 1"),
        ({"dtype": "float16"}, "dtype=float16 must be one of"),
        ({"layout": "rows"}, "kv_layout='rows' must be"),
    ],
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    fields = {
        "total_num_pages": 6,
        "page_size": 4,
        "num_kv_heads": 3,
        "head_dim": 80,
    }
    with pytest.raises(PagemillError, match=message):
        KVCacheSpec(**(fields | changes))
