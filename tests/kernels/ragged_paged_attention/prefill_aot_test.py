"""The prefill kernel compiles for every generation, without a TPU."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from pagemill.kernels.ragged_paged_attention.prefill import prefill_attention
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams, Tuning

GENERATIONS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
COLUMNS = ("v6e:2x2", "tpu7x:2x2x1")


def compile_for(
    generation: str,
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    page_size: int = 16,
    tokens: int = 512,
    seqs: int = 16,
    columns: bool | None = None,
    extras: bool = False,
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

    pages = (1000, 2, heads[1], page_size, head_dim)
    per_head = {
        "k_scale": operand((heads[1],), jnp.float32),
        "v_scale": operand((heads[1],), jnp.float32),
        "sinks": operand((heads[0],), jnp.float32),
    }
    run = functools.partial(
        prefill_attention,
        params=AttentionParams(
            sm_scale=0.1, kv_layout=KVLayout.PLANES, **options
        ),
        tuning=Tuning(),
        columns=columns,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(
            operand((tokens, heads[0], head_dim), dtype),
            operand(pages, kv_dtype or dtype),
            operand((seqs,)),
            operand((seqs * 2048 // page_size,)),
            operand((seqs + 1,)),
            operand((1,)),
            **(per_head if extras else {}),
        )
        return traced.lower(lowering_platforms=("tpu",)).compile().as_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation(generation: str, dtype: str) -> None:
    text = compile_for(generation, dtype=dtype, heads=(32, 8))
    way = "columns" if generation in COLUMNS else "rows"
    assert f"prefill_attention_{way}" in text


@pytest.mark.parametrize("generation", GENERATIONS)
def test_options(generation: str) -> None:
    compile_for(generation, extras=True, sliding_window=512, soft_cap=30.0)


@pytest.mark.parametrize(
    "kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "float32"]
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_cache_dtypes(generation: str, kv_dtype: str) -> None:
    compile_for(generation, kv_dtype=kv_dtype, page_size=32, extras=True)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 192, 256])
@pytest.mark.parametrize("generation", ["v5e:2x2", "v6e:2x2"])
def test_head_dims(generation: str, head_dim: int) -> None:
    compile_for(generation, head_dim=head_dim)


@pytest.mark.parametrize(
    "heads", [(7, 1), (8, 8), (25, 5), (32, 32), (9, 3), (128, 8)], ids=str
)
@pytest.mark.parametrize("generation", ["v5e:2x2", "v6e:2x2"])
def test_head_counts(generation: str, heads: tuple[int, int]) -> None:
    compile_for(generation, heads=heads)


@pytest.mark.parametrize("page_size", [1, 8, 64, 256])
@pytest.mark.parametrize("generation", ["v5e:2x2", "v6e:2x2"])
def test_page_sizes(generation: str, page_size: int) -> None:
    compile_for(generation, page_size=page_size)
