"""The TPU kernels that write pages, in the interpreter, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.ragged_paged_attention import write_planes
from pagemill.kernels.ragged_paged_attention.write import write_kv_pages_tpu
from pagemill.kernels.ragged_paged_attention.write_runs import run_lengths
from pagemill.kv_cache import DTYPES, KVCacheSpec, KVLayout

# (q_len, first position): decodes, chunks, prompts, and ends of pages.
MIXED = ((1, 0), (1, 37), (20, 3), (5, 14), (0, 9), (1, 15), (16, 16), (33, 0))


@pytest.fixture(autouse=True)
def _drop_programs() -> Iterator[None]:
    """Hundreds of the interpreter's programs would use up memory maps."""
    yield
    jax.clear_caches()


def bits_of(dtype: Any) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def any_bits(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """NaN of every kind, infinities, denormals."""
    bits = bits_of(dtype)
    rng = np.random.default_rng(seed)
    return rng.integers(0, np.iinfo(bits).max, shape, bits, True).view(dtype)


def slots_of(spec: KVCacheSpec, seqs: Any, seed: int = 0) -> Any:
    """i32[T], a few dead ones last; each sequence has pages of its own."""
    size = spec.page_size
    pages = iter(np.random.default_rng(seed).permutation(spec.total_num_pages))
    slots: list[int] = []
    for q_len, first in seqs:
        begin = first // size
        own = {
            column: next(pages)
            for column in range(begin, -(-(first + q_len) // size))
        }
        slots += [
            own[position // size] * size + position % size
            for position in range(first, first + q_len)
        ]
    return np.array([*slots, -1, -1, -1, -1], np.int32)


def check(spec: KVCacheSpec, slots: Any) -> None:
    """Against a loop in NumPy: also what is not written is compared."""
    shape = (len(slots), spec.num_kv_heads, spec.head_dim)
    k, v = (any_bits(shape, spec.dtype, seed) for seed in (1, 2))
    padded = len(slots) % 8 > 0 or spec.shape[-1] > spec.head_dim
    if spec.layout is not KVLayout.PLANES and padded:
        # XLA's CPU pads narrow floats as float32, which changes some bits.
        rng = np.random.default_rng(1)
        k, v = 5 * rng.standard_normal((2, *shape)).astype(spec.dtype)
    kv_pages = any_bits(spec.shape, spec.dtype, 3)
    write = functools.partial(
        write_kv_pages_tpu,
        layout=spec.layout,
        interpret=pltpu.InterpretParams(
            detect_races=True,
            out_of_bounds_reads="raise",
            uninitialized_memory="nan",
        ),
    )
    found = jax.jit(write)(*map(jnp.asarray, (kv_pages, k, v, slots)))
    jax.block_until_ready(found)
    # A private name, the only one there is: renamed, this must fail.
    races: Any = interpret_pallas_call.races
    assert not races.races_found
    bits = bits_of(spec.dtype)
    expected = kv_pages.view(bits).copy()
    for token, slot in enumerate(slots):
        if not 0 <= slot < spec.total_num_pages * spec.page_size:
            continue
        page, offset = divmod(int(slot), spec.page_size)
        if spec.layout is KVLayout.PLANES:
            there = expected[page, :, :, offset]
            there[...] = 0
            there[0, :, : spec.head_dim] = k[token].view(bits)
            there[1, :, : spec.head_dim] = v[token].view(bits)
            continue
        there = expected[page, offset].reshape(-1, spec.shape[-1])
        there[...] = 0
        rows = there[: 2 * spec.num_kv_heads, : spec.head_dim]
        rows[0::2], rows[1::2] = k[token].view(bits), v[token].view(bits)
    np.testing.assert_array_equal(np.asarray(found).view(bits), expected)


@pytest.mark.parametrize("page_size", [1, 2, 8, 16, 24, 32, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", list(KVLayout))
def test_mixed_batch(layout: KVLayout, dtype: str, page_size: int) -> None:
    pages = 12 + 100 // page_size
    spec = KVCacheSpec(pages, page_size, 2, 80, dtype, layout)
    check(spec, slots_of(spec, MIXED))


@pytest.mark.parametrize(
    ("heads", "head_dim"), [(1, 64), (3, 128), (2, 192), (5, 256)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_heads(layout: KVLayout, dtype: str, heads: int, head_dim: int) -> None:
    spec = KVCacheSpec(12, 16, heads, head_dim, dtype, layout)
    check(spec, slots_of(spec, MIXED))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_slots_in_any_order(layout: KVLayout, dtype: str) -> None:
    """Tokens of a tile that are not neighbours; and slots there are not."""
    spec = KVCacheSpec(6, 32, 2, 128, dtype, layout)
    slots = np.arange(6 * 32, dtype=np.int32)[::-1].copy()
    check(spec, slots[:88])
    np.random.default_rng(0).shuffle(slots)
    slots[[3, 17, 40]] = -1, 6 * 32, 2**31 - 1
    check(spec, slots[:88])


@pytest.mark.parametrize("layout", list(KVLayout))
def test_many_tokens(layout: KVLayout) -> None:
    """Several blocks of tokens, that cut a tile; fewer slots than a group."""
    spec = KVCacheSpec(150, 16, 1, 128, "bfloat16", layout)
    check(spec, slots_of(spec, ((5, 3), (2200, 0))))
    small = KVCacheSpec(3, 2, 1, 128, "float32", layout)
    check(small, slots_of(small, ((1, 1), (2, 0))))


def test_wide_mode() -> None:
    with jax.enable_x64(True):
        for layout in KVLayout:
            spec = KVCacheSpec(12, 16, 2, 128, "bfloat16", layout)
            check(spec, slots_of(spec, MIXED))


@pytest.mark.parametrize("layout", list(KVLayout))
def test_nothing_to_write(layout: KVLayout) -> None:
    spec = KVCacheSpec(4, 16, 2, 128, "float32", layout)
    check(spec, np.full(9, -1, np.int32))
    check(spec, np.zeros(0, np.int32))


def test_ring_of_two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with pages of megabytes: each tile waits for the one before."""
    monkeypatch.setattr(write_planes, "_RING_BYTES", 0)
    spec = KVCacheSpec(12, 16, 2, 128, "bfloat16", KVLayout.PLANES)
    check(spec, slots_of(spec, MIXED))


def test_run_lengths() -> None:
    slots = jnp.asarray([5, 6, 7, 8, 20, 21, -1, -1, 22, 22, 24, -1], jnp.int32)
    found = run_lengths(slots, 6)
    assert found.tolist() == [4, 3, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1]
    assert run_lengths(slots, 3).tolist()[:3] == [3, 2, 1]
    assert run_lengths(slots, 6, 4).tolist()[:4] == [3, 2, 1, 1]
