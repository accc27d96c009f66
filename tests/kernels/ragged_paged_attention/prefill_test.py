"""The prefill kernel in its interpreter, against dense attention in float64."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any

# On CPUs the interpreter's programs are compiled by XLA, which fuses a product
# and a sum, rounding once, here but not there: results would then depend on
# which of two equal expressions computed them. TPUs have no such instruction.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_cpu_max_isa=AVX"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common.chip import chip
from pagemill.kernels.common.kv_block import kv_block
from pagemill.kernels.ragged_paged_attention import prefill_shape
from pagemill.kernels.ragged_paged_attention.prefill import prefill_attention
from pagemill.kernels.ragged_paged_attention.prefill_shape import fit
from pagemill.kv_cache import KVLayout
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


@pytest.fixture(autouse=True)
def _drop_programs() -> Iterator[None]:
    """Hundreds of the interpreter's programs would use up memory maps."""
    yield
    _compiled.cache_clear()
    jax.clear_caches()


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
    streamed: bool | None = None,
    **options: Any,
) -> Any:
    options.setdefault("sm_scale", c.q.shape[-1] ** -0.5)
    arrays = {
        name: jnp.asarray(options.pop(name), jnp.float32)
        for name in ("k_scale", "v_scale", "sinks")
        if name in options
    }
    tuning = Tuning(
        num_kv_pages_per_block=pages,
        num_queries_per_block=queries,
        stream_page_table=streamed,
    )
    kernel = _compiled(
        AttentionParams(kv_layout=KVLayout.PLANES, **options),
        tuning,
        columns,
        min_q_len,
    )
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
def test_mixed_rows(options: dict[str, Any], dtype: str, columns: bool) -> None:
    check(case(ROWS, dtype=dtype), columns=columns, **options)


@pytest.mark.parametrize("pages", [8, 132])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 140}], ids=str)
def test_streamed_page_table(
    pages: int, options: dict[str, Any], columns: bool
) -> None:
    """To the bit what it is with the table in scalar memory.

    Keys far apart in size make tiles start again by columns; the fetching end
    is then ahead, with a window on its way.
    """
    c = case(((40, 300), (0, 5), (3, 64), (17, 195), (1, 1)), page_size=2)
    c.kv_pages[:, 0] *= 40
    arguments = {"columns": columns, "pages": pages, "sm_scale": 1.0}
    out, lse = run(c, streamed=True, **arguments, **options)
    expected, expected_lse = run(c, streamed=False, **arguments, **options)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


def test_sinks(columns: bool) -> None:
    """One far above the logits, one far below, one -inf."""
    sinks = np.array([3.0, 300.0, -300.0, -np.inf])
    check(case(ROWS), columns=columns, sinks=sinks, min_q_len=3)


def test_more_queries_than_keys(columns: bool) -> None:
    rows = ((40, 2), (5, 0), (20, 35), (33, 32))
    check(case(rows), columns=columns, sinks=np.zeros(4))
    check(case(rows), columns=columns, sliding_window=3, causal=False)


@pytest.mark.parametrize(
    "kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float32"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_dtypes(kv_dtype: str, dtype: str, columns: bool) -> None:
    check(
        case(((40, 131), (9, 64)), dtype=dtype, kv_dtype=kv_dtype),
        columns=columns,
        k_scale=np.array([0.5, 0.03]),
        v_scale=np.array([0.02, 0.01]),
    )


@pytest.mark.parametrize(
    "heads",
    [(7, 1), (4, 4), (25, 5), (1, 1), (18, 9)],
    ids=str,
)
def test_head_counts(heads: tuple[int, int], columns: bool) -> None:
    check(case(((40, 100), (3, 33)), heads=heads), columns=columns)


def test_tiles_that_fill_no_lanes() -> None:
    """Little VMEM, by rows: 16 queries of 7 heads are no multiple of 128."""
    c = case(((40, 100), (3, 33)), heads=(7, 1))
    tuning = Tuning(vmem_limit_bytes=2**20)
    params = AttentionParams(kv_layout=KVLayout.PLANES, sm_scale=0.1)
    block = kv_block(c.kv_pages, params, head_dim=128)
    width = c.page_indices.shape[1]
    assert fit(c.q, block, width, tuning, columns=False).rows % 128
    out, lse = _compiled(params, tuning, columns=False, min_q_len=0)(
        *c.operands
    )
    expected, expected_lse = oracle(c, sm_scale=0.1)
    tolerance = TOLERANCES["float32"]
    np.testing.assert_allclose(out, expected, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 256])
def test_head_dims(head_dim: int, dtype: str, columns: bool) -> None:
    c = case(((40, 100), (3, 33)), head_dim=head_dim, dtype=dtype)
    check(c, columns=columns)


@pytest.mark.parametrize("page_size", [1, 8, 64, 128])
def test_page_sizes(page_size: int, columns: bool) -> None:
    c = case(((40, 300), (9, 33)), page_size=page_size)
    check(c, columns=columns, pages=max(1, 64 // page_size))


@pytest.mark.parametrize("pages", [1, 3, None])
@pytest.mark.parametrize("queries", [32, 128])
def test_blocks(pages: int | None, queries: int, columns: bool) -> None:
    check(
        case(ROWS),
        columns=columns,
        pages=pages,
        queries=queries,
        sliding_window=40,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_several_parts(dtype: str, columns: bool) -> None:
    """As large as on TPUs: 512 keys and 512 rows."""
    c = case(
        ((150, 1800), (60, 1030), (3, 700)),
        heads=(4, 1),
        page_size=64,
        dtype=dtype,
    )
    check(c, columns=columns, pages=8, queries=128)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("at", [0, 32, 150])
@pytest.mark.parametrize("scale", [1e4, -1e4, 300.0])
def test_jumps(scale: float, at: int, dtype: str, columns: bool) -> None:
    """One key whose logits tower over, or lie below, those of all before."""
    c = case(((64, 200), (7, 150)), dtype=dtype)
    q, pages = c.q.copy(), c.kv_pages.copy()
    q[:, :, 0] = 1.0
    page = c.page_indices[0, at // 16]
    pages[page, 0, :, at % 16, 0] = scale
    c = dataclasses.replace(c, q=q, kv_pages=pages)
    check(c, columns=columns, sm_scale=1.0)


@pytest.mark.parametrize("level", [1e3, -1e3, -60.0])
def test_all_logits_far_from_zero(level: float, columns: bool) -> None:
    c = case(((64, 200), (7, 150)))
    q, pages = c.q.copy(), c.kv_pages.copy()
    q[:, :, 0] = 1.0
    pages[:, 0, :, :, 0] = level
    check(dataclasses.replace(c, q=q, kv_pages=pages), columns=columns)
    sinks = np.array([3.0, 300.0, -300.0, -np.inf])
    c = dataclasses.replace(c, q=q, kv_pages=pages)
    check(c, columns=columns, sinks=sinks, min_q_len=8)


def test_growing_logits(columns: bool) -> None:
    """Each key's logit is 40 above the one before, from -4,000 on."""
    c = case(((64, 200),))
    q, pages = c.q.copy(), c.kv_pages.copy()
    q[:, :, 1:] = 0.0
    q[:, :, 0] = 1.0
    for key in range(200):
        page = c.page_indices[0, key // 16]
        pages[page, 0, :, key % 16, 0] = 40.0 * key - 4000.0
    c = dataclasses.replace(c, q=q, kv_pages=pages)
    check(c, columns=columns, sm_scale=1.0)


def alone(c: Case, seq: int) -> Case:
    """The same sequence in a batch of its own."""
    at = c.tokens(seq)
    return dataclasses.replace(
        c,
        q=c.q[at],
        kv_lens=c.kv_lens[seq : seq + 1],
        page_indices=c.page_indices[seq : seq + 1],
        cu_q_lens=np.array([0, at.stop - at.start], np.int32),
        num_seqs=np.ones(1, np.int32),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seq", [0, 3, 7])
def test_neighbours_do_not_matter(seq: int, dtype: str, columns: bool) -> None:
    """Not by one bit: alone, and between others whose live keys are bad.

    Others' logits jump, so that their rows are computed again.
    """
    c = case(ROWS, dtype=dtype)
    expected = run(alone(c, seq), columns=columns)
    pages, q = c.kv_pages.copy(), c.q.copy()
    for other, (_, kv_len) in enumerate(ROWS):
        if other != seq and kv_len:
            bad = np.nan if other % 2 else 1e4
            pages[c.pages(other)] = bad
            q[c.tokens(other), :, 0] = 100.0
    out, lse = run(dataclasses.replace(c, kv_pages=pages, q=q), columns=columns)
    np.testing.assert_array_equal(out[c.tokens(seq)], expected[0])
    np.testing.assert_array_equal(lse[c.tokens(seq)], expected[1])


def test_two_cores(columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    two = dataclasses.replace(chip(), cores=2)
    monkeypatch.setattr(prefill_shape, "chip", lambda: two)
    _compiled.cache_clear()
    check(case(ROWS), columns=columns)
    _compiled.cache_clear()


def test_wide_mode(columns: bool) -> None:
    with jax.enable_x64(True):
        check(case(ROWS), columns=columns, sliding_window=33)


def test_no_sequence(columns: bool) -> None:
    c = case(((20, 20),))
    c = dataclasses.replace(c, num_seqs=np.zeros(1, np.int32))
    out, lse = run(c, columns=columns)
    assert not out.any()
    assert (lse == -np.inf).all()
