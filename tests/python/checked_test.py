"""checked(): the validator inside programs, in C++ and as a vectorised code."""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pagemill
import pytest
from jax.experimental import topologies
from pagemill import CheckCode, PagemillError, RaggedBatch, UnsupportedError
from pagemill.batch import ARRAYS, STATICS

from tests.python.b0 import i32, metadata, with_rows

# What a program that fails raises: it depends on who waits for it.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)

NO_SLOT = [-1] * 7
SLOTS = i32(*range(12, 16), *range(16, 20), 32 + 8, *NO_SLOT)
GOOD = {
    "plain": metadata(),
    "bare rows": with_rows(4, kv_lens=i32(20, 9, -5, 9999)),
    "idle": metadata(num_seqs=i32(0), distribution=i32(0, 0, 0)),
    "distribution": metadata(distribution=i32(0, 1, 2)),
    "slots": metadata(slot_mapping=SLOTS),
    "all": metadata(distribution=i32(0, 0, 2), slot_mapping=SLOTS),
}
# At least one batch for each code that a RaggedBatch can break.
BAD = {
    "products": metadata(total_num_pages=2**30),
    "num_seqs high": metadata(num_seqs=i32(3)),
    "num_seqs negative": metadata(num_seqs=i32(-1)),
    "distribution": metadata(distribution=i32(3, 2, 2)),
    "start": metadata(cu_q_lens=i32(2, 8, 9)),
    "start negative": metadata(cu_q_lens=i32(-3, 8, 9)),
    "falls": with_rows(
        3, cu_q_lens=i32(0, 8, 4, 9), kv_lens=i32(20, 9, 9), num_seqs=i32(3)
    ),
    "tokens": metadata(cu_q_lens=i32(0, 16, 17), kv_lens=i32(32, 9)),
    "kv negative": metadata(kv_lens=i32(20, -1)),
    "query": metadata(kv_lens=i32(4, 9)),
    "long": metadata(kv_lens=i32(40, 9)),
    "page": metadata(page_indices=np.array([[0, 1], [-1, 8]], np.int32)),
    "decode": metadata(distribution=i32(2, 2, 2)),
    "prefill": metadata(distribution=i32(0, 2, 2)),
    "two writers": metadata(page_indices=np.array([[0, 1], [1, 3]], np.int32)),
    "reader": metadata(
        page_indices=np.array([[0, 1], [1, 2]], np.int32),
        kv_lens=i32(20, 20),
        cu_q_lens=i32(0, 1, 2),
    ),
    "slot": metadata(slot_mapping=i32(*SLOTS[:8], 100, *NO_SLOT)),
    "dead slot": metadata(slot_mapping=i32(*SLOTS[:15], 3)),
    "many": with_rows(
        4,
        kv_lens=i32(20, 9, 3, 40),
        cu_q_lens=i32(0, 8, 9, 13, 14),
        num_seqs=i32(4),
    ),
}


def found(
    batch: RaggedBatch, level: Any = "full", window: int | None = None
) -> tuple[int, str]:
    """What validate() finds: the codes as a bit mask, and its words."""
    try:
        pagemill.validate(batch, level=level, sliding_window=window)
    except PagemillError as error:
        codes = {v.code for v in error.violations}
        return sum(1 << code for code in codes), str(error)
    return 0, ""


@functools.partial(jax.jit, static_argnames=("level", "implementation"))
def run(batch: RaggedBatch, **options: Any) -> Any:
    return pagemill.checked(batch, **options)


def device_batch(changes: dict[str, Any]) -> RaggedBatch:
    return jax.tree.map(jnp.asarray, RaggedBatch(**changes))


def assert_same(a: RaggedBatch, b: RaggedBatch) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype == np.int32
        np.testing.assert_array_equal(x, y)


def assert_idle(batch: RaggedBatch) -> None:
    pagemill.validate(batch)
    assert batch.num_seqs == 0
    if batch.slot_mapping is not None:
        assert (np.asarray(batch.slot_mapping) == -1).all()


def test_every_code_has_a_batch() -> None:
    bits = 0
    for changes in BAD.values():
        bits |= found(RaggedBatch(**changes))[0]
    # No RaggedBatch has such sizes, and no TPU's memory is named here.
    unseen = (1 << CheckCode.SIZE) | (1 << CheckCode.SMEM_BUDGET)
    assert bits == 2 ** len(CheckCode) - 1 - unseen


@pytest.mark.parametrize("implementation", [None, "cpu", "xla"])
@pytest.mark.parametrize("name", GOOD)
def test_good_batches_pass_through(name: str, implementation: Any) -> None:
    batch = RaggedBatch(**GOOD[name])
    for level in ("structure", "full"):
        out, code = run(batch, level=level, implementation=implementation)
        assert_same(out, batch)
        assert code.shape == (1,) and code.dtype == np.int32 and code == 0
        out, code = pagemill.checked(batch, level)
        assert_same(out, batch)
        assert code == 0
        pagemill.raise_for_code(code, batch)


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_fail_on_cpus_in_the_same_words(name: str) -> None:
    batch = RaggedBatch(**BAD[name])
    for level in ("structure", "full"):
        bits, words = found(batch, level)
        if not bits:
            run(batch, level=level)[1].block_until_ready()
            continue
        with pytest.raises(FAILURES) as info:
            jax.block_until_ready(run(batch, level=level))
        assert words in str(info.value)
        with pytest.raises(PagemillError) as eager:
            pagemill.checked(batch, level)
        assert str(eager.value) == words


@pytest.mark.parametrize("name", BAD)
def test_bad_batches_idle_elsewhere(name: str) -> None:
    batch = RaggedBatch(**BAD[name])
    for level in ("structure", "full"):
        bits, _ = found(batch, level)
        out, code = run(batch, level=level, implementation="xla")
        assert code == bits
        if name != "products":  # No number of rows mends sizes.
            assert_idle(out) if bits else assert_same(out, batch)
    with pytest.raises(PagemillError) as info:
        pagemill.raise_for_code(code, batch)
    assert str(info.value) == found(batch)[1]
    assert info.value.violations


def test_sizes_that_no_batch_has() -> None:
    batch = RaggedBatch(**metadata())
    leaves = jax.tree.leaves(batch)
    for place in range(3):
        sizes = [16, 8, 16]
        sizes[place] = 0
        arrays = [*leaves, None, None]
        wrong = RaggedBatch.tree_unflatten(tuple(sizes), arrays)
        assert code_of(wrong) == found(wrong)[0] == 1 << CheckCode.SIZE


# ------------------------------------------------- code against validate()


def code_of(
    batch: RaggedBatch, level: str = "full", window: int | None = None
) -> int:
    from pagemill.check_in_program import check_code

    none = jnp.zeros(0, jnp.int32)
    code = jax.jit(
        check_code,
        static_argnames=(
            "page_size",
            "total_num_pages",
            "max_num_tokens",
            "level",
            "sliding_window",
        ),
    )(
        batch.num_seqs,
        batch.kv_lens,
        batch.page_indices,
        batch.cu_q_lens,
        none if batch.distribution is None else batch.distribution,
        none if batch.slot_mapping is None else batch.slot_mapping,
        page_size=batch.page_size,
        total_num_pages=batch.total_num_pages,
        max_num_tokens=batch.max_num_tokens,
        level=level,
        sliding_window=window or 0,
    )
    return int(code[0])


ROWS, SLOTS_PER_ROW, PAGE, PAGES, TOKENS = 6, 4, 4, 40, 24
EDGES = (0, 1, -1, 2, 3, 4, 5, 8, 16, 17, 24, 25, 40)
EXTREMES = (2**31 - 1, -(2**31), 2**31 - 2, -(2**31) + 1, 2**30, 2**24)


def random_good(rng: np.random.Generator) -> dict[str, Any]:
    """Decodes, then chunks of one length, then mixed rows; some shared."""
    num_seqs = int(rng.integers(0, ROWS + 1))
    decode = int(rng.integers(0, num_seqs + 1))
    prefill = int(rng.integers(decode, num_seqs + 1))
    q_lens = rng.integers(0, 6, num_seqs)
    q_lens[:decode] = 1
    q_lens[decode:prefill] = rng.integers(1, 4)
    while q_lens.sum() > TOKENS:
        q_lens[prefill:] //= 2
        if q_lens[prefill:].sum() == 0:
            q_lens[decode:prefill] = 1
    kv_lens = q_lens + rng.integers(0, SLOTS_PER_ROW * PAGE + 1 - q_lens)
    ids = rng.permutation(PAGES).astype(np.int32)
    table = ids[: ROWS * SLOTS_PER_ROW].reshape(ROWS, SLOTS_PER_ROW)
    # A prefix that all read, where no row writes it.
    common = ids[-SLOTS_PER_ROW:]
    for row in range(num_seqs):
        full = (kv_lens[row] - q_lens[row]) // PAGE
        shared = int(rng.integers(0, full + 1))
        table[row, :shared] = common[:shared]
        table[row, -(-kv_lens[row] // PAGE) :] = rng.choice(EXTREMES)
    cu_q_lens = np.full(ROWS + 1, q_lens.sum(), np.int32)
    cu_q_lens[: num_seqs + 1] = np.concatenate([[0], np.cumsum(q_lens)])
    dead = rng.choice(EXTREMES, ROWS).astype(np.int32)
    dead[:num_seqs] = kv_lens
    slots = np.full(TOKENS, -1, np.int32)
    for row in range(num_seqs):
        for i in range(q_lens[row]):
            at = kv_lens[row] - q_lens[row] + i
            page = table[row, at // PAGE]
            slots[cu_q_lens[row] + i] = page * PAGE + at % PAGE
    return {
        "kv_lens": dead,
        "page_indices": table,
        "cu_q_lens": cu_q_lens,
        "num_seqs": i32(num_seqs),
        "distribution": i32(decode, prefill, num_seqs),
        "slot_mapping": slots,
        "page_size": PAGE,
        "total_num_pages": PAGES,
        "max_num_tokens": TOKENS,
    }


def plant(rng: np.random.Generator, batch: dict[str, Any]) -> None:
    """Changes one number, mostly to another that could stand there."""
    name = str(rng.choice(ARRAYS))
    array = batch[name].reshape(-1)
    place = int(rng.integers(array.size))
    kind = int(rng.integers(4))
    if kind == 0:
        array[place] = rng.choice(EXTREMES)
    elif kind == 1:
        array[place] = rng.choice(EDGES)
    elif kind == 2:
        array[place] = array[int(rng.integers(array.size))]
    else:
        near = int(array[place]) + int(rng.choice([-1, 1]))
        array[place] = np.clip(near, -(2**31), 2**31 - 1)


@pytest.mark.parametrize("optional", [True, False])
@pytest.mark.parametrize("level", ["structure", "full"])
def test_code_is_what_validate_finds(level: Any, optional: bool) -> None:
    rng = np.random.default_rng(3)
    seen: set[int] = set()
    for trial in range(2000):
        changes = random_good(rng)
        if not optional:
            changes |= {"distribution": None, "slot_mapping": None}
        if trial % 8:
            whole = {n: i32(0) if v is None else v for n, v in changes.items()}
            for _ in range(int(rng.integers(1, 5))):
                plant(rng, whole)
            changes |= {n: whole[n] for n in whole if changes[n] is not None}
        batch = RaggedBatch(**changes)
        window = 5 if trial % 4 == 1 else None
        bits, words = found(batch, level, window)
        code = code_of(batch, level, window)
        assert code == bits, (changes, words)
        assert trial % 8 or not bits, words
        seen.add(bits)
    union = functools.reduce(int.__or__, seen)
    wanted = {
        code
        for code, of, _, _ in pagemill._core.checks()
        if level == "full" or of.name == "STRUCTURE"
    } - {CheckCode.SIZE, CheckCode.INT32_PRODUCT, CheckCode.SMEM_BUDGET}
    if not optional:
        wanted -= {
            CheckCode.DISTRIBUTION,
            CheckCode.DECODE_ROW,
            CheckCode.PREFILL_ROW,
            CheckCode.SLOT_MAPPING,
        }
    assert {c for c in CheckCode if union >> c & 1} == wanted
    assert len(seen) > 30 and 0 in seen


def test_slots_of_rows_that_overlap() -> None:
    """Where cu_q_lens falls, each row's slots are looked at all the same."""
    base = with_rows(
        3,
        cu_q_lens=i32(0, 8, 4, 9),
        kv_lens=i32(20, 9, 9),
        num_seqs=i32(3),
        slot_mapping=np.zeros(16, np.int32),
    )
    right_for_first = i32(*range(12, 20), *[0] * 8)
    right_for_last = i32(0, 0, 0, 0, *range(68, 73), *[0] * 7)
    for slots in (right_for_first, right_for_last):
        batch = RaggedBatch(**base | {"slot_mapping": slots})
        bits = found(batch)[0]
        assert bits >> CheckCode.SLOT_MAPPING & 1
        assert code_of(batch) == bits


def test_lengths_that_only_int64_holds() -> None:
    """Modulo 2^32 every row is of length 1, as decodes are."""
    low, high = -(2**31), 2**31 - 1
    for decode in (0, 1, 2):
        for ends in ((high, low, low + 1), (low, high, low)):
            batch = RaggedBatch(
                **with_rows(
                    2,
                    cu_q_lens=i32(*ends),
                    kv_lens=i32(20, 20),
                    distribution=i32(decode, 2, 2),
                )
            )
            assert code_of(batch) == found(batch)[0]


# -------------------------------------------------------------- transforms


def test_the_op_runs_on_what_is_checked() -> None:
    rng = np.random.default_rng(0)
    q = rng.normal(size=(16, 4, 128)).astype(np.float32)
    kv_pages = rng.normal(size=(8, 16, 4, 128)).astype(np.float32)
    k = np.ones((16, 2, 128), np.float32)

    @functools.partial(jax.jit, static_argnames="implementation")
    def step(batch: RaggedBatch, implementation: Any) -> Any:
        batch, code = pagemill.checked(batch, implementation=implementation)
        out, pages = pagemill.ragged_paged_attention(
            q, kv_pages, batch, k=k, v=k
        )
        return out, pages, code

    good = RaggedBatch(**metadata(slot_mapping=SLOTS))
    plain = pagemill.ragged_paged_attention(q, kv_pages, good, k=k, v=k)
    for implementation in (None, "xla"):
        out, pages, code = step(good, implementation)
        np.testing.assert_array_equal(out, plain[0])
        np.testing.assert_array_equal(pages, plain[1])
        assert code == 0
    shared = np.array([[0, 1], [1, 3]], np.int32)
    for slots in (SLOTS, None):
        bad = RaggedBatch(**metadata(page_indices=shared, slot_mapping=slots))
        with pytest.raises(FAILURES, match="page 1"):
            jax.block_until_ready(step(bad, None))
        out, pages, code = step(bad, "xla")
        assert code != 0
        assert not np.asarray(out).any()
        np.testing.assert_array_equal(pages, kv_pages)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_scan(implementation: Any) -> None:
    good = device_batch(metadata())
    lengths = jnp.asarray([[20, 9], [21, 10], [4, 9]], jnp.int32)

    @jax.jit
    def steps(lengths: jax.Array) -> Any:
        def body(carry: Any, kv_lens: jax.Array) -> Any:
            batch = RaggedBatch(**metadata(kv_lens=kv_lens))
            batch, code = pagemill.checked(batch, implementation=implementation)
            return carry + batch.num_seqs, code

        return jax.lax.scan(body, jnp.zeros_like(good.num_seqs), lengths)

    total, codes = steps(lengths[:2])
    assert total == 4 and not codes.any() and codes.shape == (2, 1)
    if implementation is None:
        with pytest.raises(FAILURES, match="q_len=8"):
            jax.block_until_ready(steps(lengths))
    else:
        total, codes = steps(lengths)
        assert total == 4
        assert codes.tolist() == [[0], [0], [1 << CheckCode.QUERY_EXCEEDS_KV]]


def test_vmap_has_a_code_for_each_example() -> None:
    batch = device_batch(metadata(distribution=i32(0, 0, 2)))
    lengths = jnp.asarray([[20, 9], [4, 9], [20, -1]], jnp.int32)
    axes = jax.tree.map(lambda _: None, batch)
    object.__setattr__(axes, "kv_lens", 0)

    def run(implementation: Any, lengths: Any) -> Any:
        many = jax.tree.map(lambda x: x, batch)
        object.__setattr__(many, "kv_lens", lengths)
        return jax.vmap(
            functools.partial(pagemill.checked, implementation=implementation),
            in_axes=(axes,),
        )(many)

    out, codes = run("xla", lengths)
    assert codes.shape == (3, 1)
    assert codes[:, 0].tolist() == [
        found(RaggedBatch(**metadata(kv_lens=np.asarray(row))))[0]
        for row in lengths
    ]
    assert out.num_seqs.tolist() == [[2], [0], [0]]
    assert out.distribution.tolist() == [[0, 0, 2], [0, 0, 0], [0, 0, 0]]
    assert run(None, lengths[:1])[1].tolist() == [[0]]
    with pytest.raises(FAILURES, match="q_len=8"):
        jax.block_until_ready(run(None, lengths))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_shard_map(implementation: Any) -> None:
    """Each shard has rows of its own; what all share need not be sharded."""
    devices = np.array(jax.devices("cpu")[:2])
    assert len(devices) == 2
    mesh = jax.sharding.Mesh(devices, ("data",))
    spec = jax.sharding.PartitionSpec
    slots = np.concatenate([SLOTS, SLOTS])
    pages = np.array([[0, 1], [2, 3]] * 2, np.int32)

    def shard(kv_lens: Any, page_indices: Any, slots: Any) -> Any:
        batch = RaggedBatch(
            **metadata(
                kv_lens=kv_lens, page_indices=page_indices, slot_mapping=slots
            )
        )
        batch, code = pagemill.checked(batch, implementation=implementation)
        return batch.num_seqs, code

    run = jax.jit(
        jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(spec("data"), spec("data"), spec("data")),
            out_specs=spec("data"),
        )
    )
    num_seqs, codes = run(i32(20, 9, 20, 9), pages, slots)
    assert num_seqs.tolist() == [2, 2] and codes.tolist() == [0, 0]
    bad = (i32(20, 9, 4, 9), pages, slots)
    if implementation is None:
        with pytest.raises(FAILURES, match="q_len=8"):
            jax.block_until_ready(run(*bad))
    else:
        num_seqs, codes = run(*bad)
        assert num_seqs.tolist() == [2, 0]
        assert codes.tolist() == [0, 1 << CheckCode.QUERY_EXCEEDS_KV]


def test_gradients_of_other_things_pass() -> None:
    def loss(x: jax.Array, batch: RaggedBatch) -> jax.Array:
        batch, _ = pagemill.checked(batch)
        return (x * batch.num_seqs).sum()

    grad = jax.jit(jax.grad(loss))(jnp.ones(3), RaggedBatch(**metadata()))
    assert grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_x64(implementation: Any) -> None:
    batch = RaggedBatch(**GOOD["all"])
    with jax.enable_x64(True):
        out, code = run(batch, implementation=implementation)
        assert code.dtype == np.int32
    assert_same(out, batch)


def test_disabled_jit() -> None:
    batch = RaggedBatch(**metadata())
    with jax.disable_jit():
        out, code = pagemill.checked(batch, implementation="xla")
    assert_same(out, batch)
    assert code == 0


def test_one_trace_for_many_batches() -> None:
    traces = 0

    @jax.jit
    def step(batch: RaggedBatch) -> Any:
        nonlocal traces
        traces += 1
        return pagemill.checked(batch)

    for length in range(9, 20):
        step(RaggedBatch(**metadata(kv_lens=i32(20, length))))
    assert traces == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_lens": i32(20)}, "kv_lens must have 2 entries"),
        ({"cu_q_lens": i32(0, 8)}, "cu_q_lens must have 3 entries"),
        ({"num_seqs": i32()}, "num_seqs must have 1 entries"),
        ({"page_indices": i32(0, 1)}, "page_indices must have 2 dimensions"),
        ({"distribution": i32(0, 2)}, "distribution must have 3 entries"),
        ({"distribution": np.int32(0)}, "distribution must have 1 dimension"),
        ({"slot_mapping": i32(1)}, "slot_mapping must have 16 entries"),
        ({"slot_mapping": np.zeros(16, "f4")}, "slot_mapping must be int32"),
        ({"page_size": np.int64(0)}, "page_size=0 must be in range"),
        ({"max_num_tokens": np.int64(-1)}, "max_num_tokens=-1 must be"),
    ],
)
def test_handler_without_the_layers_above(
    change: dict[str, Any], words: str
) -> None:
    """A program that was built by other means reads nothing out of bounds."""
    given = metadata(distribution=i32(), slot_mapping=i32()) | change
    names = ("num_seqs", *(name for name in ARRAYS if name != "num_seqs"))
    call = jax.ffi.ffi_call(
        "pagemill_checked", jax.ShapeDtypeStruct((1,), jnp.int32)
    )
    sizes = {name: np.int64(given[name]) for name in STATICS}
    run = jax.jit(
        functools.partial(
            call, **sizes, full=np.bool_(True), sliding_window=np.int64(0)
        )
    )
    with pytest.raises(FAILURES, match=words):
        jax.block_until_ready(run(*(given[name] for name in names)))


# --------------------------------------------------------------- for a TPU


def test_exports_for_cpu_and_tpu_at_once() -> None:
    def step(num_seqs: Any, kv_lens: Any) -> Any:
        batch = metadata(
            num_seqs=num_seqs,
            kv_lens=kv_lens,
            distribution=jnp.asarray([0, 0, 2], jnp.int32),
            slot_mapping=jnp.asarray(SLOTS),
        )
        batch, code = pagemill.checked(RaggedBatch(**batch))
        return batch.num_seqs, code

    exported = jax.export.export(
        jax.jit(step),
        platforms=["cpu", "tpu"],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call("pagemill_checked")
        ],
    )(i32(2), i32(20, 9))
    assert exported.platforms == ("cpu", "tpu")
    assert exported.call(i32(2), i32(20, 9))[1] == 0
    with pytest.raises(FAILURES, match="q_len=8"):
        jax.block_until_ready(exported.call(i32(2), i32(4, 9)))


@pytest.mark.parametrize("generation", ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
def test_compiles_for_tpus(generation: str) -> None:
    device = topologies.get_topology_desc(
        platform="tpu", topology_name=generation
    ).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.sharding.Mesh([device], ("x",))

    def operand(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)

    batch = RaggedBatch(
        kv_lens=operand(64),
        page_indices=operand(64, 32),
        cu_q_lens=operand(65),
        num_seqs=operand(1),
        distribution=operand(3),
        slot_mapping=operand(256),
        page_size=16,
        total_num_pages=1000,
        max_num_tokens=256,
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(pagemill.checked).trace(batch)
        lowered = traced.lower(lowering_platforms=("tpu",))
        lowered.compile()
    assert "custom_call" not in lowered.as_text()


# ---------------------------------------------------------------- refusals


def test_argument_mistakes() -> None:
    batch = RaggedBatch(**metadata())
    for wrong in (None, metadata(), (1, 2)):
        with pytest.raises(PagemillError, match="not a RaggedBatch"):
            pagemill.checked(wrong)  # type: ignore[arg-type]
        with pytest.raises(PagemillError, match="not a RaggedBatch"):
            pagemill.raise_for_code(0, wrong)  # type: ignore[arg-type]
    for level in ("all", None, ["full"]):
        with pytest.raises(PagemillError, match="level="):
            pagemill.checked(batch, level)  # type: ignore[arg-type]
    with pytest.raises(PagemillError, match="implementation="):
        pagemill.checked(batch, implementation="gpu")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="needs a TPU"):
        pagemill.checked(batch, implementation="tpu")


def test_raise_for_code() -> None:
    good, bad = (RaggedBatch(**metadata(kv_lens=i32(n, 9))) for n in (20, 4))
    pagemill.raise_for_code(0, bad)  # The device saw no fault.
    with pytest.raises(PagemillError, match="q_len=8"):
        pagemill.raise_for_code(1, bad)
    for code in (1 << CheckCode.QUERY_EXCEEDS_KV, i32(256)):
        with pytest.raises(RuntimeError, match="QUERY_EXCEEDS_KV") as info:
            pagemill.raise_for_code(code, good)
        assert "right on the host" in str(info.value)
        assert not isinstance(info.value, PagemillError)
    with pytest.raises(RuntimeError, match="no kind of check"):
        pagemill.raise_for_code(1 << 20, good)
    for wrong in (i32(0, 0), [1.5], "x", None):
        with pytest.raises(PagemillError, match="one integer"):
            pagemill.raise_for_code(wrong, good)
    with pytest.raises(PagemillError, match="traced"):
        jax.jit(lambda code: pagemill.raise_for_code(code, good))(i32(0))


def test_window_rows_pass_only_with_the_window() -> None:
    # The first row's window has passed its slots 0 and 1, and the second row
    # writes what they still name.
    batch = device_batch(
        {
            "kv_lens": i32(100, 20),
            "page_indices": np.int32(
                [[5, 6, 2, 3, 4, 7, 8], [5, 6, 0, 0, 0, 0, 0]]
            ),
            "cu_q_lens": i32(0, 1, 5),
            "num_seqs": i32(2),
            "page_size": 16,
            "total_num_pages": 16,
            "max_num_tokens": 8,
        }
    )
    check = functools.partial(pagemill.checked, sliding_window=32)
    for implementation in ("cpu", "xla"):
        call = functools.partial(check, implementation=implementation)
        _, code = jax.jit(call)(batch)
        assert int(code[0]) == 0
    check(batch)
    with pytest.raises(PagemillError, match="page 6 is written"):
        pagemill.checked(batch)
    _, code = jax.jit(
        functools.partial(pagemill.checked, implementation="xla")
    )(batch)
    assert int(code[0]) == 1 << CheckCode.SHARED_PAGE_WRITTEN
    pagemill.raise_for_code(0, batch)
    with pytest.raises(PagemillError, match="page 6"):
        pagemill.raise_for_code(code, batch)
