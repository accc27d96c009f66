"""Fitted block sizes, and what a TPU cannot hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagemill.errors import Problem
from pagemill.kernels.ragged_paged_attention import tuning
from pagemill.kernels.ragged_paged_attention.limits import tpu_limits
from pagemill.params import Tuning

SHAPE = tuning.KernelShape(
    max_num_tokens=256,
    pages_per_seq=32,
    page_size=16,
    num_q_heads=32,
    num_kv_heads=8,
    head_dim=128,
    dtype=jnp.dtype(jnp.bfloat16),
)


def shape(**changes: Any) -> tuning.KernelShape:
    return dataclasses.replace(SHAPE, **changes)


def limits(
    shape: tuning.KernelShape, max_num_seqs: int, **options: int
) -> list[Problem]:
    call = {
        "T": shape.max_num_tokens,
        "P": shape.pages_per_seq,
        "page": shape.page_size,
        "Hq": shape.num_q_heads,
        "num_kv_heads": shape.num_kv_heads,
        "D": shape.head_dim,
        "q": jax.ShapeDtypeStruct((), shape.dtype),
        "S": max_num_seqs,
        **options,
    }
    return list(tpu_limits(call))


@given(
    tokens=st.integers(1, 8192),
    slots=st.integers(1, 4096),
    page_size=st.integers(1, 256),
    heads=st.sampled_from([(8, 8), (32, 8), (7, 1), (28, 4), (25, 5), (1, 1)]),
    head_dim=st.sampled_from([64, 80, 96, 128, 256]),
    dtype=st.sampled_from([jnp.bfloat16, np.float32]),
)
def test_fitted_blocks_are_legal(
    tokens: int,
    slots: int,
    page_size: int,
    heads: tuple[int, int],
    head_dim: int,
    dtype: Any,
) -> None:
    """C40: what is fitted passes the checks of what is given."""
    fitted_for = shape(
        max_num_tokens=tokens,
        pages_per_seq=slots,
        page_size=page_size,
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=jnp.dtype(dtype),
    )
    blocks = tuning.fit(fitted_for, Tuning())
    assert 0 < blocks.pages <= slots
    assert blocks.queries > 0
    assert blocks.queries & (blocks.queries - 1) == 0
    again = Tuning(
        num_kv_pages_per_block=blocks.pages,
        num_queries_per_block=blocks.queries,
    )
    assert tuning.fit(fitted_for, again) == blocks
    # Only a single page that is too large by itself can be past a limit.
    assert not limits(fitted_for, 1) or blocks.pages == 1


def test_given_sizes_are_kept() -> None:
    given_sizes = Tuning(num_kv_pages_per_block=7, num_queries_per_block=20)
    assert tuning.fit(SHAPE, given_sizes) == tuning.BlockSizes(7, 32)


def test_a_small_budget_makes_small_blocks() -> None:
    small = tuning.fit(SHAPE, Tuning(vmem_limit_bytes=3 * 2**20))
    blocks = tuning.fit(SHAPE, Tuning())
    assert small.pages < blocks.pages
    assert tuning.vmem_bytes(SHAPE, small) <= 3 * 2**20


def test_page_table_in_scalar_memory() -> None:
    """C41."""
    (problem,) = limits(shape(pages_per_seq=2048), 256)
    assert problem.argument == "page_indices"
    assert "2102272 bytes" in problem.message
    assert "at least 64 tokens" in problem.remedy
    assert not limits(shape(pages_per_seq=512, page_size=64), 256)


@pytest.mark.parametrize("head_dim", [1, 64, 80, 96, 128, 256, 384])
def test_head_dims_that_fit(head_dim: int) -> None:
    assert not limits(shape(head_dim=head_dim), 64)


@pytest.mark.parametrize("head_dim", [129, 192])
def test_head_dims_that_do_not(head_dim: int) -> None:
    """C34."""
    (problem,) = limits(shape(head_dim=head_dim), 64)
    assert f"head_dim={head_dim}" in problem.message
    assert "256" in problem.remedy


def test_pages_that_fill_vector_memory() -> None:
    large = shape(page_size=1024, num_kv_heads=32)
    (problem,) = limits(large, 64)
    assert problem.argument == "vmem_limit_bytes"
    assert not limits(large, 64, vmem_limit_bytes=100 * 2**20)
