"""The TPU kernel compiles for every generation, on a machine without a TPU."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from pagemill.kernels.ragged_paged_attention.kernel import (
    ragged_paged_attention_tpu,
)
from pagemill.params import AttentionParams, Tuning

GENERATIONS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
DTYPES = ("float32", "bfloat16")
NUM_PAGES = 1000


def compile_for(
    generation: str,
    dtype: str,
    *,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    page_size: int = 16,
    max_num_seqs: int = 64,
    pages_per_seq: int = 32,
    **options: Any,
) -> Any:
    """Lowers and compiles the kernel for one device of a topology."""
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=generation
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.sharding.Mesh([device], ("x",))

    def operand(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    run = functools.partial(
        ragged_paged_attention_tpu,
        params=AttentionParams(sm_scale=0.1, **options),
        tuning=Tuning(),
    )
    pages = (NUM_PAGES, page_size, 2 * heads[1], head_dim)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(
            operand((256, heads[0], head_dim), dtype),
            operand(pages, dtype),
            operand((max_num_seqs,)),
            operand((max_num_seqs, pages_per_seq)),
            operand((max_num_seqs + 1,)),
            operand((1,)),
        )
        return traced.lower(lowering_platforms=("tpu",)).compile()


def moves_of_cache(compiled: Any) -> list[str]:
    """Instructions of the program that rewrite an array of all pages."""
    return [
        line.strip()
        for line in compiled.as_text().splitlines()
        if re.search(
            rf"= \w+\[{NUM_PAGES},[^=]* (copy|reshape|transpose|fusion)\(",
            line,
        )
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation(generation: str, dtype: str) -> None:
    compiled = compile_for(generation, dtype)
    assert "tpu_custom_call" in compiled.as_text()
    assert not moves_of_cache(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(8, 8), (4, 2), (7, 1), (12, 12)], ids=str)
def test_cache_is_not_copied(heads: tuple[int, int], dtype: str) -> None:
    assert not moves_of_cache(compile_for("v6e:2x2", dtype, heads=heads))


def test_copies_of_the_cache_are_seen() -> None:
    """The check above finds one: ten rows per token do not fill tiles."""
    assert moves_of_cache(compile_for("v6e:2x2", "bfloat16", heads=(25, 5)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_wide_heads(generation: str, dtype: str) -> None:
    compile_for(generation, dtype, head_dim=256)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [(8, 8), (4, 2), (25, 5), (7, 1), (12, 12), (9, 3), (1, 1)],
    ids=str,
)
def test_head_counts(heads: tuple[int, int], dtype: str) -> None:
    """C36."""
    compile_for("v6e:2x2", dtype, heads=heads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generation", GENERATIONS[1:])
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_narrow_heads(head_dim: int, generation: str, dtype: str) -> None:
    """C34."""
    compile_for(generation, dtype, heads=(4, 2), head_dim=head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 8, 32, 128])
def test_page_sizes(page_size: int, dtype: str) -> None:
    """C38."""
    compile_for("v6e:2x2", dtype, heads=(4, 2), page_size=page_size)


@pytest.mark.parametrize(
    "options",
    [{"causal": False}, {"sliding_window": 512}, {"soft_cap": 30.0}],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    compile_for("v6e:2x2", "bfloat16", heads=(4, 2), **options)
