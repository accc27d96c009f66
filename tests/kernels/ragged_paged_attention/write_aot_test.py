"""The kernels that write pages compile for every generation, in place."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ.setdefault("TPU_LOG_DIR", "disabled")

import jax
import jax.numpy as jnp
import pagemill
import pytest
from jax.experimental import topologies
from pagemill.kernels.ragged_paged_attention import update
from pagemill.kv_cache import DTYPES, KVCacheSpec, KVLayout

GENERATIONS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")


def compile_for(generation: str, fn: Any, *shapes: Any) -> str:
    """A program's text, its first argument donated."""
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=generation
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.sharding.Mesh([device], ("x",))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(fn, donate_argnums=0).trace(*args)
        lowered = traced.lower(lowering_platforms=("tpu",))
    text: str = lowered.compile().as_text()
    return text


def check(
    generation: str, spec: KVCacheSpec, tokens: int, *, whole: bool = True
) -> None:
    """Compiles the op, and sees that nothing else makes an array of pages."""
    kv = (tokens, spec.num_kv_heads, spec.head_dim)
    text = compile_for(
        generation,
        functools.partial(update.update_kv_pages, layout=spec.layout),
        jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        jax.ShapeDtypeStruct(kv, spec.dtype),
        jax.ShapeDtypeStruct(kv, spec.dtype),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    assert "write_kv_" in text
    assert "scatter" not in text
    assert not whole or not moves_of_cache(text, spec)


def moves_of_cache(text: str, spec: KVCacheSpec) -> list[str]:
    """Instructions whose result is as large as the cache, and no view."""
    sizes = [spec.total_num_pages, spec.total_num_pages * spec.page_size]
    kinds = ("parameter(", "bitcast(", "custom-call(", "get-tuple-element(")
    return [
        line.strip()
        for line in text.splitlines()
        if any(f"[{size}," in line.partition("(")[0] for size in sizes)
        and not any(f" {kind}" in line for kind in kinds)
        and " = " in line
    ]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_generation(
    generation: str, layout: KVLayout, dtype: str
) -> None:
    check(generation, KVCacheSpec(1000, 32, 8, 128, dtype, layout), 256)


@pytest.mark.parametrize("page_size", [2, 8, 16, 24, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("layout", list(KVLayout))
def test_page_sizes(layout: KVLayout, dtype: str, page_size: int) -> None:
    """Planes of pages below 32 bits are XLA's to pad."""
    size = KVCacheSpec(1001, page_size, 2, 128, dtype, layout)
    whole = page_size * size.dtype.itemsize >= 4
    check("v6e:2x2", size, 64, whole=whole or layout is not KVLayout.PLANES)


@pytest.mark.parametrize("tokens", [1, 100, 5000, 16384])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [(1, 128), (3, 64), (8, 192), (32, 256)]
)
@pytest.mark.parametrize("layout", [KVLayout.PACKED, KVLayout.PLANES])
def test_tokens_and_heads(
    layout: KVLayout, heads: int, head_dim: int, tokens: int
) -> None:
    # Too large for XLA to hold it in VMEM.
    spec = KVCacheSpec(20001, 16, heads, head_dim, "bfloat16", layout)
    check("v5e:2x2", spec, tokens, whole=heads != 3)


def test_the_op_writes_by_the_kernel() -> None:
    spec = KVCacheSpec(20001, 16, 8, 128, "bfloat16", KVLayout.PLANES)
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)

    def step(kv_pages: Any, q: Any, k: Any, v: Any, metadata: Any) -> Any:
        return pagemill.ragged_paged_attention(
            q, kv_pages, metadata, k=k, v=v, kv_layout="planes"
        )

    kv = jax.ShapeDtypeStruct((64, 8, 128), jnp.bfloat16)
    text = compile_for(
        "v6e:2x2",
        step,
        jax.ShapeDtypeStruct(spec.shape, spec.dtype),
        jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16),
        kv,
        kv,
        (i32((32,)), i32((32, 8)), i32((33,)), i32((1,))),
    )
    assert "write_kv_planes" in text
    assert not moves_of_cache(text, spec)
