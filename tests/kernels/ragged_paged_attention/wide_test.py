"""The TPU kernels over a wide grid of shapes, types and options.

On demand, since it takes most of an hour. Bazel runs it in shards.
"""

from __future__ import annotations

import os
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pagemill.kv_cache import KVLayout
from pagemill.testing.batches import Batch, random_batch

from tests.kernels.ragged_paged_attention import aot_test, interpret_test
from tests.kernels.ragged_paged_attention.covering import covering

# Of q, and of the cache.
DTYPES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    *(
        (q, kv)
        for q in ("bfloat16", "float32")
        for kv in ("float8_e4m3fn", "float8_e5m2", "int8")
    ),
)
HEADS = ((8, 2), (7, 1), (14, 2), (25, 5), (9, 3), (6, 6), (1, 1))
SHAPES = {
    "head_dim": (64, 80, 96, 112, 128, 192, 256),
    "page_size": (1, 2, 4, 8, 16, 32, 64, 128, 256),
    "dtypes": DTYPES,
    "layout": tuple(KVLayout),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"sliding_window": 19},
    "window of all": {"sliding_window": 17, "causal": False},
    "cap": {"soft_cap": 3.0},
    "sinks": {},
    "tree": {},
    "everything": {"sliding_window": 35, "soft_cap": 5.0},
}
RESULTS = SHAPES | {"heads": HEADS, "options": tuple(OPTIONS)}
PROGRAMS = SHAPES | {
    "heads": ((32, 8), (28, 4), *HEADS),
    "generation": aot_test.GENERATIONS,
}


def mine(cases: list[dict[str, Any]]) -> list[Any]:
    """Those of this shard, as parameters with telling names."""
    if status := os.environ.get("TEST_SHARD_STATUS_FILE"):
        pathlib.Path(status).touch()
    shard = int(os.environ.get("TEST_SHARD_INDEX", "0"))
    shards = int(os.environ.get("TEST_TOTAL_SHARDS", "1"))
    return [
        pytest.param(case, id="-".join(str(x) for x in case.values()))
        for case in cases[shard::shards]
    ]


def rows(page_size: int) -> list[tuple[int, int]]:
    """(q_len, kv_len) around one page's border and two's."""
    around = (page_size - 1, page_size, page_size + 1, 2 * page_size + 1)
    decodes = [(1, max(kv_len, 1)) for kv_len in around]
    chunks = [(5, max(2 * page_size - 1, 5)), (3, 2 * page_size + 3)]
    return [*decodes[:2], (20, 20), chunks[0], *decodes[2:], chunks[1]]


def extras(batch: Batch, options: str) -> dict[str, Any]:
    """The arrays that the options name; pages of integers need scales."""
    num_q_heads, num_kv_heads = batch.q.shape[1], batch.kv_pages.shape[2] // 2
    everything = options == "everything"
    found: dict[str, Any] = {}
    if everything or options == "sinks":
        found["sinks"] = np.linspace(-3.0, 5.0, num_q_heads, dtype=np.float32)
    if everything or options == "tree":
        words = np.arange(len(batch.q), dtype=np.uint32)[:, None]
        found["tree_mask"] = words * np.uint32(2654435761)
    scale = 0.05 if batch.kv_pages.dtype.kind == "i" else 1.0
    if everything or scale != 1.0:
        per_head = np.linspace(0.5, 1.5, num_kv_heads, dtype=np.float32)
        found["k_scale"] = found["v_scale"] = np.float32(scale) * per_head
    return found


@pytest.mark.parametrize("case", mine(covering(RESULTS, 2)))
class TestResults(interpret_test.Interpreted):
    def test_grid(self, case: dict[str, Any]) -> None:
        q_dtype, kv_dtype = case["dtypes"]
        self.layout = case["layout"]
        batch = random_batch(
            rows(case["page_size"]),
            num_q_heads=case["heads"][0],
            num_kv_heads=case["heads"][1],
            head_dim=case["head_dim"],
            page_size=case["page_size"],
            dtype=jnp.dtype(q_dtype),
            kv_dtype=jnp.dtype(kv_dtype),
        )
        options = case["options"]
        self.check(batch, extras(batch, options), **OPTIONS[options])


@pytest.mark.parametrize("case", mine(covering(PROGRAMS, 3)))
def test_programs(case: dict[str, Any]) -> None:
    """Default tuning fits into the VMEM that the compiler grants."""
    case = dict(case)
    q_dtype, kv_dtype = case.pop("dtypes")
    compiled = aot_test.compile_for(
        case.pop("generation"), q_dtype, kv_dtype=kv_dtype, **case
    )
    assert compiled.as_text().count("tpu_custom_call") >= 2
