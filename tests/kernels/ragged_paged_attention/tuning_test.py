"""Fitted block sizes, and what a TPU cannot hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagemill.errors import Problem
from pagemill.kernels.common.kv_block import KVBlock, kv_block
from pagemill.kernels.ragged_paged_attention import decode_shape, prefill_shape
from pagemill.kernels.ragged_paged_attention.limits import tpu_limits
from pagemill.kv_cache import DTYPES, KVCacheSpec, KVLayout
from pagemill.params import AttentionParams, Tuning


def call(
    *,
    tokens: int = 256,
    seqs: int = 64,
    slots: int = 32,
    page_size: int = 16,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    dtype: Any = jnp.bfloat16,
    kv_dtype: Any = None,
    layout: KVLayout = KVLayout.PLANES,
    **options: int,
) -> dict[str, Any]:
    spec = KVCacheSpec(
        1000, page_size, heads[1], head_dim, kv_dtype or dtype, layout
    )
    return {
        "T": tokens,
        "S": seqs,
        "P": slots,
        "D": head_dim,
        "num_kv_heads": heads[1],
        "q": jax.ShapeDtypeStruct((tokens, heads[0], head_dim), dtype),
        "kv_pages": jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        **options,
    }


def limits(layout: KVLayout = KVLayout.PLANES, **changes: Any) -> list[Problem]:
    return list(tpu_limits(call(layout=layout, **changes), layout))


def block_of(made: dict[str, Any], layout: KVLayout) -> KVBlock:
    params = AttentionParams(
        sm_scale=1.0, num_kv_heads=made["num_kv_heads"], kv_layout=layout
    )
    planes = layout is KVLayout.PLANES
    head_dim = made["kv_pages"].shape[-1] if planes else made["D"]
    return kv_block(made["kv_pages"], params, head_dim=head_dim)


@given(
    tokens=st.integers(1, 8192),
    slots=st.integers(1, 4096),
    page_size=st.integers(1, 256),
    heads=st.sampled_from([(8, 8), (32, 8), (7, 1), (28, 4), (25, 5), (1, 1)]),
    head_dim=st.sampled_from([64, 80, 96, 112, 128, 192, 256]),
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32]),
    layout=st.sampled_from(list(KVLayout)),
)
def test_fitted_blocks_are_legal(
    layout: KVLayout, slots: int, **sizes: Any
) -> None:
    """C40: what is fitted passes the checks of what is given."""
    made = call(layout=layout, slots=slots, **sizes)
    block = block_of(made, layout)
    pages = decode_shape.fit_block_pages(block, slots, Tuning())
    assert 0 < pages <= slots
    fitted = prefill_shape.fit(made["q"], block, slots, Tuning(), columns=None)
    assert 0 < fitted.block_pages <= slots
    assert fitted.queries > 0
    assert fitted.queries & (fitted.queries - 1) == 0
    again = Tuning(
        num_kv_pages_per_block=fitted.block_pages,
        num_queries_per_block=fitted.queries,
    )
    assert fitted == prefill_shape.fit(
        made["q"], block, slots, again, columns=None
    )
    made["S"] = 1
    # Only a single page that is too large by itself can be past a limit.
    found = list(tpu_limits(made, layout))
    assert not found or fitted.block_pages == 1


def test_splits() -> None:
    """Few long sequences, and cores to share them."""
    block = block_of(call(), KVLayout.PLANES)
    fit = decode_shape.fit_splits
    assert fit(block, 1, 64, 2, Tuning()) == 2
    assert fit(block, 7, 64, 2, Tuning()) == 2
    assert fit(block, 8, 64, 2, Tuning()) == 1
    assert fit(block, 1, 2, 2, Tuning()) == 1
    assert fit(block, 1, 64, 1, Tuning()) == 1
    assert fit(block, 64, 64, 1, Tuning(num_kv_splits=3)) == 3


def test_a_small_budget_makes_small_blocks() -> None:
    made = call()
    block = block_of(made, KVLayout.PLANES)
    small, usual = (
        prefill_shape.fit(
            made["q"],
            block,
            32,
            Tuning(vmem_limit_bytes=limit),
            columns=True,
        )
        for limit in (6 * 2**20, None)
    )
    assert small.keys * small.queries < usual.keys * usual.queries
    assert prefill_shape.vmem_bytes(small) <= 6 * 2**20


def test_blocks_of_a_single_key() -> None:
    (problem,) = limits(slots=1, page_size=1)
    assert problem.argument == "page_indices"
    assert "at least 2 pages" in problem.remedy
    (problem,) = limits(slots=9, page_size=1, num_kv_pages_per_block=1)
    assert problem.argument == "num_kv_pages_per_block"
    assert not limits(slots=2, page_size=1)


def test_page_table_in_scalar_memory() -> None:
    """C41: in HBM if it is too large; the rest has to fit."""
    assert not limits(seqs=256, slots=2048)
    assert not limits(seqs=4096, slots=4096)
    (problem,) = limits(seqs=256, slots=2048, stream_page_table=False)
    assert problem.argument == "page_indices"
    assert "bytes of scalar memory" in problem.message
    assert "stream_page_table" in problem.remedy
    assert not limits(seqs=256, slots=512, stream_page_table=False)
    (problem,) = limits(seqs=200_000, slots=2)
    assert problem.argument == "kv_lens"
    assert "kv_lens.shape=(200000,)" in problem.message
    assert "fewer sequences" in problem.remedy


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", list(KVLayout))
def test_cache_dtypes(layout: KVLayout, dtype: str) -> None:
    """C46: any, in any layout."""
    assert not limits(layout, dtype=jnp.float32, kv_dtype=jnp.dtype(dtype))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_head_dims(layout: KVLayout, head_dim: int) -> None:
    """C34."""
    assert not limits(layout, head_dim=head_dim)


def test_pages_that_fill_vector_memory() -> None:
    large = {"page_size": 1024, "heads": (32, 32)}
    (problem,) = limits(**large)
    assert problem.argument == "vmem_limit_bytes"
    assert not limits(**large, vmem_limit_bytes=100 * 2**20)
