"""The prefill kernel in its interpreter, against dense attention in float64."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.ragged_paged_attention.prefill import prefill_attention
from pagemill.params import AttentionParams, Tuning

INTERPRET = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
# (q_len, kv_len): tiles of one sequence and of many, chunks behind a long
# prefix, no prefix, an empty row, lengths around pages of 16 and blocks of 32.
ROWS = (
    *((40, 200), (1, 33), (0, 5), (3, 64), (70, 70), (17, 95), (1, 1)),
    *((64, 193), (2, 31)),
)
Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """The kernel's operands; whatever is dead is poisoned."""

    q: Array
    kv_pages: Array
    kv_lens: Array
    page_indices: Array
    cu_q_lens: Array
    num_seqs: Array

    @property
    def operands(self) -> list[jax.Array]:
        page_indices = self.page_indices.reshape(-1)
        fields = dataclasses.replace(self, page_indices=page_indices)
        return [jnp.asarray(x) for x in vars(fields).values()]

    def tokens(self, seq: int) -> slice:
        return slice(int(self.cu_q_lens[seq]), int(self.cu_q_lens[seq + 1]))

    def pages(self, seq: int) -> Array:
        """Ids of a sequence's live pages."""
        count = -(-int(self.kv_lens[seq]) // self.kv_pages.shape[3])
        return self.page_indices[seq, :count]


def case(
    rows: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 128,
    page_size: int = 16,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    dead_tokens: int = 9,
    seed: int = 0,
) -> Case:
    """Rows of (q_len, kv_len) in shuffled pages, and two dead ones."""
    rng = np.random.default_rng(seed)
    counts = [-(-kv // page_size) for _, kv in rows]
    width, seqs = max(counts) + 1, len(rows) + 2
    ids = rng.permutation(sum(counts) + 3)
    pages = rng.normal(size=(len(ids), 2, heads[1], page_size, head_dim))
    table = np.full((seqs, width), 2**31 - 1, np.int32)
    pages[ids[sum(counts) :]] = np.nan
    for seq, ((_, kv_len), count) in enumerate(zip(rows, counts, strict=True)):
        table[seq, :count], ids = ids[:count], ids[count:]
        if kv_len % page_size:
            pages[table[seq, count - 1], :, :, kv_len % page_size :] = np.nan
    ends = np.cumsum([n for n, _ in rows])
    q = rng.normal(size=(ends[-1] + dead_tokens, heads[0], head_dim))
    q[ends[-1] :] = np.nan
    kv_type = jnp.dtype(kv_dtype or dtype)
    if kv_type == jnp.int8:
        pages = np.nan_to_num(np.round(pages * 40), nan=99).clip(-128, 127)
    return Case(
        q.astype(jnp.dtype(dtype)),
        pages.astype(kv_type),
        np.array([kv for _, kv in rows] + [2**31 - 1, -5], np.int32),
        table,
        np.array([0, *ends, 2**31 - 1, -7], np.int32),
        np.array([len(rows)], np.int32),
    )


def oracle(
    c: Case,
    *,
    sm_scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    sinks: Array | None = None,
    min_q_len: int = 0,
) -> tuple[Array, Array]:
    """Out and lse in float64, sequence by sequence and head by head."""
    _, num_q_heads, _ = c.q.shape
    _, _, num_kv_heads, _, head_dim = c.kv_pages.shape
    out = np.zeros(c.q.shape)
    lse = np.full(out.shape[:2], -np.inf)
    for seq, h in np.ndindex(int(c.num_seqs[0]), num_q_heads):
        at, kv_len = c.tokens(seq), int(c.kv_lens[seq])
        q_len = at.stop - at.start
        if q_len < max(min_q_len, 1):
            continue
        kv = c.kv_pages[c.pages(seq)].astype(np.float64)
        kv = kv.transpose(1, 2, 0, 3, 4)
        kv = kv.reshape(2, num_kv_heads, -1, head_dim)[:, :, :kv_len]
        k, v = kv[:, h * num_kv_heads // num_q_heads]
        head = h * num_kv_heads // num_q_heads
        x = c.q[at, h].astype(np.float64) @ k.T * sm_scale
        x *= 1.0 if k_scale is None else k_scale[head]
        if soft_cap is not None:
            x = soft_cap * np.tanh(x / soft_cap)
        position = kv_len - q_len + np.arange(q_len)[:, None]
        key = np.arange(kv_len)
        seen = (key <= position) | (not causal)
        if sliding_window is not None:
            seen &= key > position - sliding_window
        x = np.where(seen, x, -np.inf)
        sink = -np.inf if sinks is None else sinks[h]
        top = np.maximum(x.max(axis=1, initial=-np.inf), sink)
        base = np.where(top == -np.inf, 0.0, top)
        weights = np.exp(x - base[:, None])
        total = weights.sum(axis=1) + np.exp(sink - base)
        with np.errstate(divide="ignore"):
            lse[at, h] = base + np.log(total)
        weights /= np.where(total == 0.0, 1.0, total)[:, None]
        out[at, h] = weights @ v * (1.0 if v_scale is None else v_scale[head])
    return out, lse


@functools.cache
def _compiled(
    params: AttentionParams, tuning: Tuning, columns: bool, min_q_len: int
) -> Any:
    return jax.jit(
        functools.partial(
            prefill_attention,
            params=params,
            tuning=tuning,
            columns=columns,
            min_q_len=min_q_len,
            interpret=INTERPRET,
        )
    )


def run(
    c: Case,
    *,
    columns: bool,
    pages: int | None = 2,
    queries: int = 32,
    min_q_len: int = 0,
    **options: Any,
) -> Any:
    options.setdefault("sm_scale", c.q.shape[-1] ** -0.5)
    arrays = {
        name: jnp.asarray(options.pop(name), jnp.float32)
        for name in ("k_scale", "v_scale", "sinks")
        if name in options
    }
    tuning = Tuning(
        num_kv_pages_per_block=pages, num_queries_per_block=queries
    )
    kernel = _compiled(AttentionParams(**options), tuning, columns, min_q_len)
    out, lse = kernel(*c.operands, **arrays)
    out.block_until_ready()
    # A private name, the only one there is: renamed, this must fail.
    races: Any = interpret_pallas_call.races
    assert not races.races_found
    assert out.dtype == c.q.dtype
    return np.asarray(out), np.asarray(lse)


def check(
    c: Case,
    *,
    columns: bool,
    pages: int | None = 2,
    queries: int = 32,
    **options: Any,
) -> None:
    options.setdefault("sm_scale", c.q.shape[-1] ** -0.5)
    out, lse = run(c, columns=columns, pages=pages, queries=queries, **options)
    expected, expected_lse = oracle(c, **options)
    tolerance = TOLERANCES[c.q.dtype.name]
    assert_close = functools.partial(
        np.testing.assert_allclose, atol=tolerance, rtol=tolerance
    )
    assert_close(out.astype(np.float64), expected)
    assert_close(lse.astype(np.float64), expected_lse)
    # Rows without keys: not just small.
    none = (expected == 0.0).all(axis=-1)
    np.testing.assert_array_equal(out[none].astype(np.float32), 0.0)


@pytest.fixture(params=[True, False], ids=["columns", "rows"])
def columns(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"soft_cap": 2.0},
        {"sliding_window": 1},
        {"sliding_window": 18, "soft_cap": 5.0},
        {"sliding_window": 70, "causal": False},
        {"sliding_window": 2**31 - 1},
        {"min_q_len": 4},
    ],
    ids=str,
)
def test_mixed_rows(
    options: dict[str, Any], dtype: str, columns: bool
) -> None:
    check(case(ROWS, dtype=dtype), columns=columns, **options)
