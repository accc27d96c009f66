"""The decode kernel in its interpreter, against dense attention in float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common.chip import chip
from pagemill.kernels.ragged_paged_attention import decode
from pagemill.kernels.ragged_paged_attention.decode import decode_attention
from pagemill.kv_cache import KVLayout
from pagemill.params import AttentionParams, Tuning

INTERPRET = pltpu.InterpretParams(
    detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
)
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
# (q_len, kv_len): around a page and a block of two pages of 16, dead rows
# between, and more than a block.
ROWS = (
    *((1, 1), (1, 15), (0, 40), (1, 16), (1, 17), (1, 32), (9, 50)),
    *((1, 33), (1, 63), (1, 64), (1, 65), (1, 130)),
)
SPECULATIVE = ((3, 40), (1, 32), (2, 33), (0, 7), (4, 4), (3, 64), (4, 67))
Array = np.ndarray[Any, np.dtype[Any]]


@dataclasses.dataclass(frozen=True)
class Case:
    """The kernel's operands; whatever is dead is poisoned."""

    q: Array
    kv_pages: Array
    kv_lens: Array
    q_lens: Array
    page_indices: Array
    num_seqs: Array

    @property
    def operands(self) -> list[jax.Array]:
        page_indices = self.page_indices.reshape(-1)
        fields = dataclasses.replace(self, page_indices=page_indices)
        return [jnp.asarray(x) for x in vars(fields).values()]


def case(
    rows: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    page_size: int = 16,
    queries: int = 1,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    dead_seqs: int = 2,
    seed: int = 0,
) -> Case:
    """Rows of (q_len, kv_len) in shuffled pages."""
    rng = np.random.default_rng(seed)
    counts = [-(-kv // page_size) for _, kv in rows]
    width, seqs = max(counts) + 1, len(rows) + dead_seqs
    ids = rng.permutation(sum(counts) + 3)
    pages = rng.normal(size=(len(ids), 2, heads[1], page_size, head_dim))
    table = np.full((seqs, width), 2**31 - 1, np.int32)
    pages[ids[sum(counts) :]] = np.nan
    for seq, ((_, kv_len), count) in enumerate(zip(rows, counts, strict=True)):
        table[seq, :count], ids = ids[:count], ids[count:]
        if kv_len % page_size:
            pages[table[seq, count - 1], :, :, kv_len % page_size :] = np.nan
    q = rng.normal(size=(seqs, queries, heads[0], head_dim))
    for seq in range(seqs):
        q_len = rows[seq][0] if seq < len(rows) else 0
        q[seq, q_len if q_len <= queries else 0 :] = np.nan
    kv_type = jnp.dtype(kv_dtype or dtype)
    if kv_type == jnp.int8:
        pages = np.nan_to_num(np.round(pages * 40), nan=99).clip(-128, 127)
    dead = [2**31 - 1, -5][:dead_seqs]
    return Case(
        q.astype(jnp.dtype(dtype)),
        pages.astype(kv_type),
        np.array([kv for _, kv in rows] + dead, np.int32),
        np.array([n for n, _ in rows] + [1] * dead_seqs, np.int32),
        table,
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
) -> tuple[Array, Array]:
    """Out and lse in float64, query by query and head by head."""
    _, queries, num_q_heads, _ = c.q.shape
    _, _, num_kv_heads, page_size, head_dim = c.kv_pages.shape
    out = np.zeros(c.q.shape)
    lse = np.full(out.shape[:3], -np.inf)
    for seq in range(int(c.num_seqs[0])):
        q_len, kv_len = int(c.q_lens[seq]), int(c.kv_lens[seq])
        if not 0 < q_len <= queries:
            continue
        pages = c.kv_pages[c.page_indices[seq, : -(-kv_len // page_size)]]
        kv = pages.astype(np.float64).transpose(1, 2, 0, 3, 4)
        kv = kv.reshape(2, num_kv_heads, -1, head_dim)[:, :, :kv_len]
        for i, h in np.ndindex(q_len, num_q_heads):
            position, key = kv_len - q_len + i, np.arange(kv_len)
            head = h * num_kv_heads // num_q_heads
            x = kv[0, head] @ c.q[seq, i, h].astype(np.float64) * sm_scale
            x *= 1.0 if k_scale is None else k_scale[head]
            if soft_cap is not None:
                x = soft_cap * np.tanh(x / soft_cap)
            seen = (key <= position) | (not causal)
            if sliding_window is not None:
                seen &= key > position - sliding_window
            x, v = x[seen], kv[1, head][seen]
            sink = -np.inf if sinks is None else sinks[h]
            top = max(x.max(initial=-np.inf), sink)
            if top == -np.inf:
                continue
            total = np.exp(x - top).sum() + np.exp(sink - top)
            lse[seq, i, h] = top + np.log(total)
            out[seq, i, h] = np.exp(x - top) @ v / total
            out[seq, i, h] *= 1.0 if v_scale is None else v_scale[head]
    return out, lse


@pytest.fixture(autouse=True)
def _drop_programs() -> Iterator[None]:
    """Hundreds of the interpreter's programs would use up memory maps."""
    yield
    _compiled.cache_clear()
    jax.clear_caches()


@functools.cache
def _compiled(params: AttentionParams, tuning: Tuning) -> Any:
    return jax.jit(
        functools.partial(
            decode_attention, params=params, tuning=tuning, interpret=INTERPRET
        )
    )


def run(
    c: Case,
    *,
    pages: int | None = 2,
    splits: int | None = None,
    streamed: bool | None = None,
    **options: Any,
) -> Any:
    arrays = {
        name: jnp.asarray(options.pop(name), jnp.float32)
        for name in ("k_scale", "v_scale", "sinks")
        if name in options
    }
    if "tree_mask" in options:
        arrays["tree_mask"] = jnp.asarray(options.pop("tree_mask"))
    kernel = _compiled(
        AttentionParams(kv_layout=KVLayout.PLANES, **options),
        Tuning(
            num_kv_pages_per_block=pages,
            num_kv_splits=splits,
            stream_page_table=streamed,
        ),
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
    pages: int | None = 2,
    splits: int | None = None,
    **options: Any,
) -> None:
    options.setdefault("sm_scale", c.q.shape[-1] ** -0.5)
    out, lse = run(c, pages=pages, splits=splits, **options)
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
        {"sm_scale": 30.0},
    ],
    ids=str,
)
def test_one_query(options: dict[str, Any], dtype: str) -> None:
    check(case(ROWS, dtype=dtype), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"sliding_window": 2},
        {"sliding_window": 33},
        {"sliding_window": 33, "causal": False},
    ],
    ids=str,
)
def test_few_queries(options: dict[str, Any], dtype: str) -> None:
    check(case(SPECULATIVE, queries=4, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("pages", "options"),
    [(7, {}), (130, {}), (7, {"splits": 3}), (7, {"sliding_window": 133})],
    ids=str,
)
def test_streamed_page_table(pages: int, options: dict[str, Any]) -> None:
    """To the bit what it is with the table in scalar memory.

    Rows of more than 128 entries: windows begin anywhere, and a block of 130
    pages needs three rows of the table.
    """
    rows = ((1, 1), (1, 300), (0, 9), (1, 131), (1, 28))
    c = case(rows, page_size=2)
    out, lse = run(c, pages=pages, streamed=True, sm_scale=0.1, **options)
    expected, expected_lse = run(
        c, pages=pages, streamed=False, sm_scale=0.1, **options
    )
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(lse, expected_lse)


@pytest.mark.parametrize("queries", [1, 3])
def test_sinks(queries: int) -> None:
    sinks = np.linspace(-3.0, 6.0, 8)
    rows = ((1, 3), (queries, 66), (1, 0))
    check(case(rows, queries=queries), sinks=sinks)


def test_more_queries_than_keys() -> None:
    rows = ((4, 2), (3, 1), (4, 35))
    check(case(rows, queries=4))
    check(case(rows, queries=4), sinks=np.zeros(8))


@pytest.mark.parametrize(
    "kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16", "float32"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cache_dtypes(kv_dtype: str, dtype: str) -> None:
    rows = ((1, 31), (1, 64), (1, 100))
    check(
        case(rows, page_size=32, dtype=dtype, kv_dtype=kv_dtype),
        k_scale=np.array([0.5, 0.03]),
        v_scale=np.array([0.02, 0.01]),
    )


@pytest.mark.parametrize(
    "heads",
    [(7, 1), (4, 4), (25, 5), (12, 12), (9, 3), (1, 1), (64, 2)],
    ids=str,
)
def test_head_counts(heads: tuple[int, int]) -> None:
    check(case(((1, 40), (2, 33)), heads=heads, queries=2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 192, 256])
def test_head_dims(head_dim: int, dtype: str) -> None:
    check(case(((1, 40), (1, 33)), head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("page_size", [8, 64, 128, 256])
def test_page_sizes(page_size: int) -> None:
    check(case(((1, 300), (1, 9)), page_size=page_size), pages=None)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    two = dataclasses.replace(chip(), cores=2)
    monkeypatch.setattr(decode, "chip", lambda: two)
    _compiled.cache_clear()
    yield
    _compiled.cache_clear()


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("seqs", [1, 2, 5, 12])
def test_two_cores(seqs: int) -> None:
    """Also with fewer sequences than a step has room for, and none left."""
    for dead in (0, 1):
        check(case(ROWS[-seqs:], dead_seqs=dead), sliding_window=70)


@pytest.mark.usefixtures("two_cores")
def test_few_long_sequences_are_split() -> None:
    """One sequence keeps both cores busy: its lse is that of its parts."""
    c = case(((1, 130),), dead_seqs=0)
    check(c, sinks=np.linspace(-3.0, 6.0, 8))
    np.testing.assert_array_equal(
        run(c, sm_scale=0.1)[0], run(c, splits=2, sm_scale=0.1)[0]
    )


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "soft_cap": 2.0},
        {"sliding_window": 33},
        {"sinks": np.linspace(-3.0, 6.0, 8)},
        {"v_scale": np.array([0.5, 3.0]), "k_scale": np.array([2.0, 0.1])},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_splits(options: dict[str, Any], splits: int) -> None:
    """Parts of several blocks, of one, and of none."""
    check(case(SPECULATIVE, queries=4), pages=1, splits=splits, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 18}], ids=str)
def test_splits_of_rounded_operands(options: dict[str, Any]) -> None:
    check(case(ROWS, dtype="bfloat16"), splits=2, **options)
    c = case(ROWS, dtype="bfloat16", kv_dtype="int8", page_size=32)
    scales = {"k_scale": np.array([0.03, 0.02]), "v_scale": np.full(2, 0.02)}
    check(c, splits=3, **options, **scales)


def test_splits_of_trees() -> None:
    """A tree of siblings, whole and in parts."""
    c = case(SPECULATIVE, queries=4)
    tree = np.tile(np.array([1, 3, 5, 9], np.uint32), (len(c.q), 1))
    out, lse = run(c, sm_scale=0.1, tree_mask=tree)
    parts = run(c, pages=1, splits=3, sm_scale=0.1, tree_mask=tree)
    np.testing.assert_allclose(parts[0], out, atol=1e-5)
    np.testing.assert_allclose(parts[1], lse, atol=1e-5)


def test_wide_mode() -> None:
    with jax.enable_x64(True):
        check(case(SPECULATIVE, queries=4), sliding_window=33)


def test_no_sequence() -> None:
    c = case(((1, 20),))
    out, lse = run(
        dataclasses.replace(c, num_seqs=np.zeros(1, np.int32)), sm_scale=1.0
    )
    assert not out.any()
    assert (lse == -np.inf).all()


def test_neighbours_do_not_matter() -> None:
    """Not by one bit: alone, and between others whose live keys are NaN."""
    c = case(((1, 70), (1, 45), (1, 200), (1, 5)))
    alone = run(
        dataclasses.replace(
            c,
            q=c.q[1:2],
            kv_lens=c.kv_lens[1:2],
            q_lens=c.q_lens[1:2],
            page_indices=c.page_indices[1:2],
            num_seqs=np.ones(1, np.int32),
        ),
        sm_scale=0.1,
    )
    bad = c.kv_pages.copy()
    bad[c.page_indices[0, :5]] = np.nan
    bad[c.page_indices[2, :13]] = np.inf
    among = run(dataclasses.replace(c, kv_pages=bad), sm_scale=0.1)
    np.testing.assert_array_equal(among[0][1], alone[0][0])
    np.testing.assert_array_equal(among[1][1], alone[1][0])
