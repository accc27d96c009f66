"""Writing keys and values into pages, against plain NumPy loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagemill.kernels.ragged_paged_attention import update
from pagemill.testing.batches import Batch, random_batch


def slots_of(batch: Batch) -> Any:
    """i32[T], token by token."""
    page_size = batch.kv_pages.shape[1]
    slots = np.full(len(batch.q), -1, np.int32)
    for seq in range(batch.num_seqs[0]):
        rows = batch.rows(seq)
        q_len = rows.stop - rows.start
        for i in range(q_len):
            position = batch.kv_lens[seq] - q_len + i
            page = batch.page_indices[seq, position // page_size]
            slots[rows.start + i] = page * page_size + position % page_size
    return slots


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "seqs",
    [
        ((8, 20), (1, 9), (0, 5), (16, 16), (1, 1)),
        ((0, 3), (0, 0), (1, 17)),
        (),
    ],
    ids=str,
)
def test_slot_mapping(seqs: Any, x64: bool) -> None:
    batch = random_batch(seqs)
    with jax.enable_x64(x64):
        slots = update.slot_mapping(
            *map(jnp.asarray, batch.operands[2:]),
            max_num_tokens=len(batch.q),
            page_size=16,
            total_num_pages=len(batch.kv_pages),
        )
    assert slots.dtype == jnp.int32
    np.testing.assert_array_equal(slots, slots_of(batch))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_update_writes_live_tokens_only(dtype: Any) -> None:
    batch = random_batch(((8, 20), (1, 9)), dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(1)
    k, v = rng.normal(size=(2, len(batch.q), 2, 128)).astype(dtype)
    slots = slots_of(batch)
    expected = batch.kv_pages.reshape(-1, 4, 128).copy()
    live = slots >= 0
    expected[slots[live], 0::2] = k[live]
    expected[slots[live], 1::2] = v[live]
    out = update.update_kv_pages(
        *map(jnp.asarray, (batch.kv_pages, k, v, slots))
    )
    np.testing.assert_array_equal(out, expected.reshape(batch.kv_pages.shape))


def test_copies_read_before_they_write() -> None:
    kv_pages = np.arange(6 * 4 * 2 * 8, dtype=np.float32).reshape(6, 4, 2, 8)
    copies = np.array([[0, 1], [1, 2], [4, 0]], np.int32)
    expected = kv_pages.copy()
    expected[[1, 2, 0]] = kv_pages[[0, 1, 4]]
    pages = jnp.asarray(kv_pages)
    copied = update.copy_pages(pages, jnp.asarray(copies))
    np.testing.assert_array_equal(copied, expected)
    none = jnp.zeros((0, 2), jnp.int32)
    np.testing.assert_array_equal(update.copy_pages(pages, none), kv_pages)


@pytest.mark.parametrize("pair", [(0, -1), (-1, 0), (99, 0), (0, 99)])
def test_copies_out_of_range_are_dropped(pair: tuple[int, int]) -> None:
    pages = jnp.arange(6 * 4 * 2 * 8, dtype=jnp.float32).reshape(6, 4, 2, 8)
    copied = update.copy_pages(pages, jnp.asarray([pair], jnp.int32))
    np.testing.assert_array_equal(copied, pages)


@pytest.mark.parametrize("page", [2**28, 2**28 + 3, 8, -1, -(2**31)])
def test_tokens_of_bad_pages_go_nowhere(page: int) -> None:
    slots = update.slot_mapping(
        jnp.asarray([20], jnp.int32),
        jnp.asarray([[0, page]], jnp.int32),
        jnp.asarray([0, 8], jnp.int32),
        jnp.asarray([1], jnp.int32),
        max_num_tokens=9,
        page_size=16,
        total_num_pages=8,
    )
    assert slots.tolist() == [12, 13, 14, 15, -1, -1, -1, -1, -1]


def test_a_donated_cache_is_written_in_place() -> None:
    batch = random_batch(((8, 20), (1, 9)))
    kv_pages = jnp.asarray(batch.kv_pages)
    where = kv_pages.unsafe_buffer_pointer()
    kv = jnp.zeros((len(batch.q), 2, 128))
    write = jax.jit(update.update_kv_pages, donate_argnums=0)
    out = write(kv_pages, kv, kv, jnp.asarray(slots_of(batch)))
    assert out.unsafe_buffer_pointer() == where


@pytest.mark.parametrize(
    "dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int8]
)
def test_eight_bits_are_rounded_and_kept_finite(dtype: Any) -> None:
    """C46: to the nearest, ties to even, and no NaN for what is too large."""
    dtype = jnp.dtype(dtype)
    values = np.array(
        [0.0, 0.02, 0.031, 1.0, -1.0, 3.37, -2.53, 1e4, -1e4], np.float32
    )
    scale = np.float32(0.02)
    found = update.quantised(
        jnp.asarray(values).reshape(-1, 1, 1), jnp.full((1,), scale), dtype
    )
    every = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    every = np.unique(every[np.isfinite(every)])
    wanted = (values / scale).astype(np.float64)
    for one, got in zip(wanted, np.asarray(found).reshape(-1), strict=True):
        distance = np.abs(every - np.clip(one, every[0], every[-1]))
        assert abs(float(got) - one) <= distance.min() + 1e-6 or float(got) in (
            every[0],
            every[-1],
        )
    assert np.isfinite(np.asarray(found).astype(np.float32)).all()
    if dtype.kind == "i":
        ties = jnp.asarray([0.5, 1.5, -2.5], jnp.float32).reshape(-1, 1, 1)
        np.testing.assert_array_equal(
            update.quantised(ties, None, dtype).reshape(-1), [0, 2, -2]
        )
