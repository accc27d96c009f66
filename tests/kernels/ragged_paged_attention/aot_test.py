"""The TPU kernel compiles for every generation, on a machine without a TPU."""

from __future__ import annotations

import functools
import os
import re
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ.setdefault("TPU_LOG_DIR", "disabled")

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kernels.ragged_paged_attention.tpu import (
    ragged_paged_attention_tpu,
)
from pagemill.kv_cache import KVCacheSpec, KVLayout
from pagemill.params import AttentionParams, Tuning

GENERATIONS = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
DTYPES = ("float32", "bfloat16")
NUM_PAGES = 1000


def compile_for(
    generation: str,
    dtype: str,
    *,
    kv_dtype: str | None = None,
    layout: KVLayout = KVLayout.PLANES,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 128,
    page_size: int = 16,
    max_num_seqs: int = 64,
    pages_per_seq: int = 32,
    extras: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Lowers and compiles the op's kernels for one device of a topology."""
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=generation
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.sharding.Mesh([device], ("x",))

    def operand(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    spec = KVCacheSpec(
        NUM_PAGES, page_size, heads[1], head_dim, kv_dtype or dtype, layout
    )
    more = {
        "sinks": operand((heads[0],), jnp.float32),
        "k_scale": operand((heads[1],), jnp.float32),
        "v_scale": operand((heads[1],), jnp.float32),
        "tree_mask": operand((256, 1), jnp.uint32),
    }
    operands = Operands(
        operand((256, heads[0], head_dim), dtype),
        operand(spec.shape, spec.dtype),
        operand((max_num_seqs,)),
        operand((max_num_seqs, pages_per_seq)),
        operand((max_num_seqs + 1,)),
        operand((1,)),
        **{name: more[name] for name in extras},
    )
    params = AttentionParams(
        sm_scale=0.1,
        num_kv_heads=heads[1],
        kv_layout=layout,
        return_lse=True,
        **options,
    )
    run = functools.partial(
        ragged_paged_attention_tpu, params=params, tuning=Tuning()
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(operands)
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
    compiled = compile_for(generation, dtype, heads=(32, 8))
    assert compiled.as_text().count("tpu_custom_call") >= 2
    assert not moves_of_cache(compiled)


@pytest.mark.parametrize(
    ("kv_dtype", "heads", "page_size"),
    [("int8", 5, 1), ("int8", 5, 4), ("bfloat16", 3, 1), ("float32", 3, 1)],
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_odd_heads_of_several_registers(
    generation: str, kv_dtype: str, heads: int, page_size: int
) -> None:
    """Interleaved pages that would begin inside a tile."""
    compile_for(
        generation,
        "float32" if kv_dtype == "float32" else "bfloat16",
        kv_dtype=kv_dtype,
        layout=KVLayout.INTERLEAVED,
        heads=(heads, heads),
        head_dim=256,
        page_size=page_size,
    )


def test_large_groups_in_little_memory() -> None:
    """Tiles whose rows cannot fill lanes, where VMEM is small."""
    compile_for(
        "v4:2x2x1",
        "bfloat16",
        kv_dtype="float8_e5m2",
        layout=KVLayout.PACKED,
        heads=(28, 4),
        head_dim=256,
        page_size=4,
    )


@pytest.mark.parametrize("layout", [KVLayout.PLANES, KVLayout.INTERLEAVED])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("bfloat16", None), ("float32", None), ("bfloat16", "int8")],
)
@pytest.mark.parametrize(("page_size", "pages"), [(1, 2), (3, 1), (20, 1)])
@pytest.mark.parametrize("generation", ["v5e:2x2", "v6e:2x2"])
def test_tiny_page_tables(
    generation: str,
    page_size: int,
    pages: int,
    dtype: str,
    kv_dtype: str | None,
    layout: KVLayout,
) -> None:
    """Blocks whose keys fill no register, nor words of one."""
    compile_for(
        generation,
        dtype,
        kv_dtype=kv_dtype,
        layout=layout,
        page_size=page_size,
        pages_per_seq=pages,
    )


@pytest.mark.parametrize(
    ("seqs", "pages"),
    # A context of 1M tokens for each of four; and thousands of sequences.
    [(4, 65536), (4096, 512), (1, 2**20)],
    ids=str,
)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_page_tables_beyond_scalar_memory(
    generation: str, seqs: int, pages: int
) -> None:
    """C41."""
    compiled = compile_for(
        generation,
        "bfloat16",
        heads=(32, 8),
        max_num_seqs=seqs,
        pages_per_seq=pages,
    )
    assert not moves_of_cache(compiled)


@pytest.mark.parametrize("seqs", [1, 3])
@pytest.mark.parametrize("generation", ["v5p:2x2x1", "v6e:2x2"])
def test_few_long_sequences(generation: str, seqs: int) -> None:
    """Where cores share a kernel, each takes a part of every sequence."""
    compiled = compile_for(
        generation,
        "bfloat16",
        heads=(32, 8),
        max_num_seqs=seqs,
        pages_per_seq=1024,
        extras=("sinks",),
    )
    assert not moves_of_cache(compiled)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_pages_of_eight_bits(generation: str, kv_dtype: str) -> None:
    """C46."""
    compiled = compile_for(
        generation,
        "bfloat16",
        kv_dtype=kv_dtype,
        page_size=32,
        extras=("k_scale", "v_scale"),
    )
    assert not moves_of_cache(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [KVLayout.INTERLEAVED, KVLayout.PACKED])
@pytest.mark.parametrize("generation", ["v5e:2x2", "v6e:2x2"])
def test_layouts(generation: str, layout: KVLayout, dtype: str) -> None:
    compiled = compile_for(generation, dtype, layout=layout, heads=(8, 8))
    assert not moves_of_cache(compiled)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("layout", [KVLayout.INTERLEAVED, KVLayout.PACKED])
@pytest.mark.parametrize("generation", GENERATIONS)
def test_layouts_of_eight_bits(
    generation: str, layout: KVLayout, kv_dtype: str
) -> None:
    """C46."""
    whole: dict[str, Any] = {"kv_dtype": kv_dtype, "layout": layout}
    compiled = compile_for(generation, "bfloat16", heads=(32, 8), **whole)
    assert not moves_of_cache(compiled)
    # Rows of a token that do not fill words.
    compile_for(generation, "bfloat16", heads=(9, 3), page_size=2, **whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generation", GENERATIONS)
def test_interleaved_rows_of_odd_lanes(generation: str, dtype: str) -> None:
    """C34."""
    interleaved = KVLayout.INTERLEAVED
    compile_for(generation, dtype, layout=interleaved, head_dim=192)


def test_copies_of_the_cache_are_seen() -> None:
    """The check above finds one: ten rows per token do not fill tiles."""
    compiled = compile_for(
        "v6e:2x2", "bfloat16", layout=KVLayout.INTERLEAVED, heads=(25, 5)
    )
    assert moves_of_cache(compiled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads",
    [(8, 8), (25, 5), (7, 1), (12, 12), (9, 3), (1, 1)],
    ids=str,
)
def test_head_counts(heads: tuple[int, int], dtype: str) -> None:
    """C36."""
    assert not moves_of_cache(compile_for("v6e:2x2", dtype, heads=heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("generation", GENERATIONS[1:])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 192, 256])
def test_head_dims(head_dim: int, generation: str, dtype: str) -> None:
    """C34."""
    assert not moves_of_cache(compile_for(generation, dtype, head_dim=head_dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 8, 32, 128, 256])
def test_page_sizes(page_size: int, dtype: str) -> None:
    """C38."""
    compile_for("v6e:2x2", dtype, page_size=page_size)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"sliding_window": 512},
        {"soft_cap": 30.0},
        {"extras": ("sinks", "k_scale", "v_scale")},
        {"extras": ("tree_mask",), "sliding_window": 512},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    compile_for("v6e:2x2", "bfloat16", **options)
