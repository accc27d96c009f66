"""The op in JAX: dispatch, transforms, writes, refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pagemill
import pytest
from pagemill import (
    KVCacheSpec,
    KVLayout,
    PagemillError,
    PagePool,
    Planner,
    RaggedBatch,
    SpecError,
    Tuning,
    UnsupportedError,
)
from pagemill.testing import oracle

from tests.python.b0 import i32, metadata

METADATA = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")


def tensors(dtype: Any = np.float32, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(16, 4, 128)).astype(dtype)
    return q, rng.normal(size=(8, 16, 4, 128)).astype(dtype)


def bare(batch: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(batch[name] for name in METADATA)


def expected(
    q: Any, kv_pages: Any, batch: dict[str, Any], **options: Any
) -> Any:
    options = {"sm_scale": 128**-0.5} | options
    return oracle.ragged_paged_attention(q, kv_pages, *bare(batch), **options)


@pytest.mark.parametrize("implementation", [None, "cpu", "xla"])
@pytest.mark.parametrize("form", ["batch", "tuple", "jit"])
def test_every_way_to_call(implementation: Any, form: str) -> None:
    q, kv_pages = tensors()
    batch = metadata()
    argument: Any = RaggedBatch(**batch)
    if form == "tuple":
        argument = bare(batch)

    def call(q: Any, kv_pages: Any, argument: Any) -> Any:
        return pagemill.ragged_paged_attention(
            q, kv_pages, argument, implementation=implementation
        )

    out = (jax.jit(call) if form == "jit" else call)(q, kv_pages, argument)
    assert out.dtype == q.dtype
    np.testing.assert_allclose(
        out, expected(q, kv_pages, batch), atol=1e-4, rtol=1e-4
    )


def test_lists_and_int64_in_a_tuple() -> None:
    q, kv_pages = tensors()
    out = pagemill.ragged_paged_attention(
        q, kv_pages, ([20, 9], [[0, 1], [2, 3]], np.array([0, 8, 9]), [2])
    )
    np.testing.assert_allclose(
        out, expected(q, kv_pages, metadata()), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 5},
        {"soft_cap": 30.0},
        {"causal": False},
        {"sm_scale": np.float32(0.5)},
    ],
)
def test_options_reach_the_cpu(options: dict[str, Any]) -> None:
    q, kv_pages = tensors()
    out = pagemill.ragged_paged_attention(
        q, kv_pages, RaggedBatch(**metadata()), **options
    )
    np.testing.assert_allclose(
        out, expected(q, kv_pages, metadata(), **options), atol=1e-4, rtol=1e-4
    )


def test_writes_keys_and_values() -> None:
    rng = np.random.default_rng(1)
    pool = PagePool(8, 4)
    planner = Planner(pool, max_num_tokens=16, max_num_seqs=2, pages_per_seq=4)
    a, b = pool.open(), pool.open()
    kv_pages = jnp.full((8, 4, 4, 128), jnp.nan, jnp.float32)

    @jax.jit
    def step(q: Any, kv_pages: Any, batch: Any, k: Any, v: Any) -> Any:
        return pagemill.ragged_paged_attention(q, kv_pages, batch, k=k, v=v)

    history: dict[int, list[Any]] = {0: [], 1: []}
    for counts in ((5, 6), (1, 3), (1, 1)):
        batch = planner.plan([(a, counts[0]), (b, counts[1])])
        q, k, v = (
            rng.normal(size=(16, heads, 128)).astype(np.float32)
            for heads in (4, 2, 2)
        )
        out, kv_pages = step(q, kv_pages, batch, k, v)
        for row, request in enumerate(planner.order):
            rows = slice(batch.cu_q_lens[row], batch.cu_q_lens[row + 1])
            history[int(request)].append((k[rows], v[rows]))
            keys, values = (
                np.concatenate(x)
                for x in zip(*history[int(request)], strict=True)
            )
            dense = oracle.dense_attention(
                q[rows],
                keys,
                values,
                sm_scale=128**-0.5,
                causal=True,
                sliding_window=None,
                soft_cap=None,
            )
            np.testing.assert_allclose(out[rows], dense, atol=1e-4, rtol=1e-4)
        assert not np.asarray(out[batch.cu_q_lens[-1] :]).any()


def test_update_without_slot_mapping() -> None:
    _, kv_pages = tensors()
    rng = np.random.default_rng(2)
    k, v = rng.normal(size=(2, 16, 2, 128)).astype(np.float32)
    batch = RaggedBatch(**metadata())
    slots = i32(*range(12, 16), *range(16, 20), 32 + 8, *[-1] * 7)
    planned = RaggedBatch(**metadata(slot_mapping=slots))
    derived = pagemill.update_kv_pages(kv_pages, k, v, batch)
    np.testing.assert_array_equal(
        derived, pagemill.update_kv_pages(kv_pages, k, v, planned)
    )
    flat = kv_pages.reshape(128, 4, 128).copy()
    flat[slots[:9], 0::2], flat[slots[:9], 1::2] = k[:9], v[:9]
    np.testing.assert_array_equal(derived, flat.reshape(kv_pages.shape))


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(192, 128), (64, 128)])
@pytest.mark.parametrize("implementation", ["cpu", "xla", "interpret"])
def test_values_of_another_head_dim(
    implementation: Any, head_dim: int, v_head_dim: int, layout: KVLayout
) -> None:
    """Written over NaN, read, and scaled by K's own size."""
    if implementation == "interpret" and layout is KVLayout.INTERLEAVED:
        # Interleaved pages of 192 are past the TPU kernels' limits.
        head_dim = min(head_dim, 128)
    rng = np.random.default_rng(3)
    q, k = (rng.normal(size=(16, h, head_dim)) for h in (4, 2))
    v = rng.normal(size=(16, 2, v_head_dim))
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    spec = KVCacheSpec(8, 16, 2, head_dim, "float32", layout, v_head_dim)
    kv_pages = jnp.full(spec.shape, jnp.nan, jnp.float32)
    batch = RaggedBatch(**metadata(kv_lens=i32(8, 1)))

    def attend(kv_pages: Any, **new: Any) -> Any:
        return pagemill.ragged_paged_attention(
            q,
            kv_pages,
            batch,
            v_head_dim=v_head_dim,
            kv_layout=layout,
            num_kv_heads=2,
            implementation=implementation,
            **new,
        )

    out, written = attend(kv_pages, k=k, v=v)
    assert out.shape == (16, 4, v_head_dim)
    for rows in (slice(0, 8), slice(8, 9)):
        dense = oracle.dense_attention(
            q[rows],
            k[rows],
            v[rows],
            sm_scale=head_dim**-0.5,
            causal=True,
            sliding_window=None,
            soft_cap=None,
        )
        np.testing.assert_allclose(out[rows], dense, atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(attend(written), out)
    updated = pagemill.update_kv_pages(
        kv_pages, k, v, batch, kv_layout=layout, implementation=implementation
    )
    np.testing.assert_array_equal(updated, written)
    for found, given in zip(spec.unpack(written), (k, v), strict=True):
        np.testing.assert_array_equal(found[0, :8], given[:8])


@pytest.mark.parametrize(
    ("v_head_dim", "words"),
    [
        (0, "v_head_dim=0 must be positive"),
        (64, r"v.shape=\(16, 2, 128\) must have v_head_dim=64"),
        (256, "Q head_dim 128 must be the same as that of K/V 128"),
    ],
)
def test_v_head_dim_is_checked(v_head_dim: int, words: str) -> None:
    q, kv_pages = tensors()
    k = np.ones((16, 2, 128), np.float32)
    with pytest.raises(SpecError, match=words):
        pagemill.ragged_paged_attention(
            q,
            kv_pages,
            RaggedBatch(**metadata()),
            k=k,
            v=k,
            v_head_dim=v_head_dim,
        )


def test_donated_pages_are_written_in_place() -> None:
    q, kv_pages = tensors()
    pages = jnp.asarray(kv_pages)
    pointer = pages.unsafe_buffer_pointer()
    k = v = np.ones((16, 2, 128), np.float32)
    step = jax.jit(
        lambda q, pages, batch, k, v: pagemill.ragged_paged_attention(
            q, pages, batch, k=k, v=v
        ),
        donate_argnums=1,
    )
    _, pages = step(q, pages, RaggedBatch(**metadata()), k, v)
    assert pages.unsafe_buffer_pointer() == pointer


@pytest.mark.parametrize(
    ("copies", "words"),
    [
        ([[0, -1]], r"copies\[0\]=\[0, -1\]"),
        ([[0, 1], [99, 0]], r"copies\[1\]=\[99, 0\]"),
        ([[0, 1], [2, 1]], "page 1 is the target of several"),
        ([[0, 1, 2]], "copies.shape"),
        ([0, 1], "copies.shape"),
        ([[2**31, 0]], "does not fit int32"),
        ([[0.5, 1]], "must be int32"),
        (None, "copies"),
    ],
)
def test_copy_pages_refuses(copies: Any, words: str) -> None:
    _, kv_pages = tensors()
    with pytest.raises(PagemillError, match=words):
        pagemill.copy_pages(kv_pages, copies)


def test_copy_no_pages() -> None:
    _, kv_pages = tensors()
    np.testing.assert_array_equal(pagemill.copy_pages(kv_pages, []), kv_pages)


@pytest.mark.parametrize("implementation", [None, "cpu", "xla", "interpret"])
@pytest.mark.parametrize(
    "bad",
    [
        {"page_indices": np.array([[0, 1], [-1, 3]], np.int32)},
        {"page_indices": np.array([[0, 2**28], [2, 3]], np.int32)},
        {"num_seqs": i32(-1)},
        {"slot_mapping": i32(*[100] * 9, *[-1] * 7)},
    ],
)
def test_eager_calls_prove_their_batch(
    implementation: Any, bad: dict[str, Any]
) -> None:
    """C01, C10: wrong values are refused by all, and nothing is written."""
    q, kv_pages = tensors()
    before = kv_pages.copy()
    batch = RaggedBatch(**metadata(**bad))
    k = np.ones((16, 2, 128), np.float32)
    for call in (
        lambda: pagemill.ragged_paged_attention(
            q, kv_pages, batch, k=k, v=k, implementation=implementation
        ),
        lambda: pagemill.update_kv_pages(kv_pages, k, k, batch),
    ):
        with pytest.raises(PagemillError) as info:
            call()
        assert info.value.violations
    np.testing.assert_array_equal(kv_pages, before)


def test_update_wants_a_batch() -> None:
    _, kv_pages = tensors()
    k = np.ones((16, 2, 128), np.float32)
    with pytest.raises(PagemillError, match="must be a RaggedBatch"):
        pagemill.update_kv_pages(kv_pages, k, k, bare(metadata()))


@pytest.mark.parametrize("tuning", [{}, 5])
def test_tuning_of_another_kind(tuning: Any) -> None:
    q, kv_pages = tensors()
    with pytest.raises(PagemillError, match="tuning is a"):
        pagemill.ragged_paged_attention(
            q, kv_pages, RaggedBatch(**metadata()), tuning=tuning
        )


def test_copy_pages() -> None:
    _, kv_pages = tensors()
    copied = pagemill.copy_pages(kv_pages, np.array([[1, 5], [2, 6]], np.int32))
    np.testing.assert_array_equal(copied[5], kv_pages[1])
    np.testing.assert_array_equal(copied[6], kv_pages[2])
    np.testing.assert_array_equal(copied[:5], kv_pages[:5])


def test_k_without_v() -> None:
    q, kv_pages = tensors()
    with pytest.raises(PagemillError, match="v is missing"):
        pagemill.ragged_paged_attention(
            q, kv_pages, RaggedBatch(**metadata()), k=q[:, :2]
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"page_size": 8}, "batch.page_size=8"),
        ({"total_num_pages": 9}, "batch.total_num_pages=9"),
        ({"max_num_tokens": 32}, "batch.max_num_tokens=32"),
    ],
)
def test_batch_of_other_sizes(change: dict[str, int], words: str) -> None:
    q, kv_pages = tensors()
    with pytest.raises(SpecError, match=words):
        pagemill.ragged_paged_attention(
            q, kv_pages, RaggedBatch(**metadata(**change))
        )


def test_bad_metadata_surfaces_with_the_validators_text() -> None:
    q, kv_pages = tensors()
    bad = metadata(kv_lens=i32(4, 9))
    with pytest.raises(PagemillError) as info:
        pagemill.validate(**bad)
    call = jax.jit(pagemill.ragged_paged_attention)
    with pytest.raises(Exception, match="q_len=8 must be less or equal") as e:
        jax.block_until_ready(call(q, kv_pages, RaggedBatch(**bad)))
    assert str(info.value) in str(e.value)


def test_tpu_on_a_cpu_is_refused() -> None:
    q, kv_pages = tensors()
    batch = RaggedBatch(**metadata())
    for call in (lambda f: f(q), lambda f: jax.jit(f)(q)):
        with pytest.raises(UnsupportedError, match="interpret"):
            call(
                lambda q: pagemill.ragged_paged_attention(
                    q, kv_pages, batch, implementation="tpu"
                )
            )


@pytest.mark.parametrize("name", ["gpu", "", 1])
def test_unknown_implementation(name: Any) -> None:
    q, kv_pages = tensors()
    with pytest.raises(PagemillError, match="implementation="):
        pagemill.ragged_paged_attention(
            q, kv_pages, RaggedBatch(**metadata()), implementation=name
        )


@pytest.mark.parametrize("batch", [None, (1, 2), {"kv_lens": 1}])
def test_batch_of_another_kind(batch: Any) -> None:
    q, kv_pages = tensors()
    with pytest.raises(PagemillError, match="batch is a"):
        pagemill.ragged_paged_attention(q, kv_pages, batch)


def test_numpy_lists_for_q_are_refused() -> None:
    _, kv_pages = tensors()
    with pytest.raises(SpecError, match="q is a list"):
        pagemill.ragged_paged_attention(
            [[1.0]], kv_pages, RaggedBatch(**metadata())
        )


def test_tuning_is_checked() -> None:
    q, kv_pages = tensors()
    with pytest.raises(SpecError, match="num_kv_pages_per_block=3"):
        pagemill.ragged_paged_attention(
            q,
            kv_pages,
            RaggedBatch(**metadata()),
            tuning=Tuning(num_kv_pages_per_block=3),
        )


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradient_is_refused(implementation: Any) -> None:
    q, kv_pages = tensors()
    batch = RaggedBatch(**metadata())
    with pytest.raises(UnsupportedError, match="no gradient"):
        jax.grad(
            lambda q: pagemill.ragged_paged_attention(
                q, kv_pages, batch, implementation=implementation
            ).sum()
        )(jnp.asarray(q))


def test_disabled_jit() -> None:
    q, kv_pages = tensors()
    batch = RaggedBatch(**metadata())
    out = pagemill.ragged_paged_attention(q, kv_pages, batch)
    with jax.disable_jit():
        again = pagemill.ragged_paged_attention(q, kv_pages, batch)
    np.testing.assert_array_equal(out, again)


def test_vmap_of_nothing() -> None:
    q, kv_pages = tensors()
    batch = RaggedBatch(**metadata())
    out = jax.vmap(
        lambda q: pagemill.ragged_paged_attention(q, kv_pages, batch)
    )(np.zeros((0, *q.shape), np.float32))
    assert out.shape == (0, *q.shape)


@pytest.mark.parametrize("axes", [(0, None), (0, 0), (1, 0)])
def test_vmap(axes: tuple[Any, Any]) -> None:
    examples = [tensors(seed=seed) for seed in range(3)]
    q = np.stack([e[0] for e in examples], axis=axes[0])
    kv_pages = examples[0][1]
    if axes[1] is not None:
        kv_pages = np.stack([e[1] for e in examples], axis=axes[1])
    batch = RaggedBatch(**metadata())
    out = jax.vmap(
        lambda q, kv: pagemill.ragged_paged_attention(q, kv, batch), axes
    )(q, kv_pages)
    for i, (one_q, own_kv) in enumerate(examples):
        one_kv = kv_pages if axes[1] is None else own_kv
        np.testing.assert_array_equal(
            out[i], pagemill.ragged_paged_attention(one_q, one_kv, batch)
        )


def test_one_program_per_shape() -> None:
    q, kv_pages = tensors()
    traces = 0

    @jax.jit
    def step(q: Any, kv_pages: Any, batch: Any) -> Any:
        nonlocal traces
        traces += 1
        return pagemill.ragged_paged_attention(q, kv_pages, batch)

    for length in (9, 10, 17, 32):
        step(q, kv_pages, RaggedBatch(**metadata(kv_lens=i32(20, length))))
    assert traces == 1


# C49: x64 mode changes nothing.
@pytest.mark.parametrize("implementation", ["cpu", "xla", "interpret"])
def test_c49_x64(implementation: Any) -> None:
    q, kv_pages = tensors()
    batch = RaggedBatch(**metadata())
    k = v = np.ones((16, 2, 128), np.float32)

    def call() -> Any:
        return pagemill.ragged_paged_attention(
            q, kv_pages, batch, k=k, v=v, implementation=implementation
        )

    plain = call()
    with jax.enable_x64(True):
        for a, b in zip(plain, call(), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


# C101: q in another memory order.
def test_c101_transposed_q() -> None:
    q, kv_pages = tensors()
    strided = np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2)
    assert not strided.flags.c_contiguous
    batch = RaggedBatch(**metadata())
    np.testing.assert_array_equal(
        pagemill.ragged_paged_attention(strided, kv_pages, batch),
        pagemill.ragged_paged_attention(q, kv_pages, batch),
    )


def test_exports_for_cpu_and_tpu_at_once() -> None:
    q, kv_pages = tensors()
    batch = metadata()

    def call(q: Any, kv_pages: Any, *arrays: Any) -> Any:
        return pagemill.ragged_paged_attention(q, kv_pages, arrays)

    exported = jax.export.export(
        jax.jit(call),
        platforms=["cpu", "tpu"],
        disabled_checks=[
            jax.export.DisabledSafetyCheck.custom_call(
                "pagemill_ragged_paged_attention"
            )
        ],
    )(q, kv_pages, *bare(batch))
    assert exported.platforms == ("cpu", "tpu")
    np.testing.assert_allclose(
        exported.call(q, kv_pages, *bare(batch)),
        expected(q, kv_pages, batch),
        atol=1e-4,
        rtol=1e-4,
    )


def test_c79_shard_map_over_heads() -> None:
    devices = np.array(jax.devices("cpu")[:2])
    if len(devices) < 2:
        pytest.fail("the test needs two host devices: set XLA_FLAGS")
    q, kv_pages = tensors()
    mesh = jax.sharding.Mesh(devices, ("heads",))
    spec = jax.sharding.PartitionSpec
    batch = RaggedBatch(**metadata())
    sharded = jax.shard_map(
        pagemill.ragged_paged_attention,
        mesh=mesh,
        in_specs=(
            spec(None, "heads"),
            spec(None, None, "heads"),
            jax.tree.map(lambda _: spec(), batch),
        ),
        out_specs=spec(None, "heads"),
    )
    np.testing.assert_allclose(
        jax.jit(sharded)(q, kv_pages, batch),
        expected(q, kv_pages, metadata()),
        atol=1e-4,
        rtol=1e-4,
    )


@pytest.mark.parametrize("implementation", ["cpu", "xla"])
def test_every_option_through_the_op(implementation: Any) -> None:
    q, kv_pages = tensors()
    rng = np.random.default_rng(3)
    sinks = rng.normal(size=4).astype(np.float32)
    tree_mask = rng.integers(0, 2**32, (16, 1), np.uint32)

    @jax.jit
    def attend(k_scale: Any) -> Any:
        return pagemill.ragged_paged_attention(
            q,
            kv_pages,
            RaggedBatch(**metadata()),
            sinks=sinks.astype(jnp.bfloat16),
            k_scale=k_scale,
            v_scale=2.0,
            tree_mask=tree_mask,
            mask_value=-1e38,
            return_lse=True,
            implementation=implementation,
        )

    for k_scale in (0.5, 1.5):
        out, lse = attend(jnp.float32(k_scale))
        want, want_lse = oracle.ragged_paged_attention_and_lse(
            q,
            kv_pages,
            *bare(metadata()),
            sm_scale=128**-0.5,
            sinks=np.asarray(sinks.astype(jnp.bfloat16), np.float32),
            k_scale=k_scale,
            v_scale=2.0,
            tree_mask=tree_mask,
        )
        np.testing.assert_allclose(out, want, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(lse, want_lse, atol=1e-4, rtol=1e-4)
    assert attend._cache_size() == 1


@pytest.mark.parametrize("layout", list(KVLayout))
def test_c46_eight_bit_pages_are_written_and_read(layout: KVLayout) -> None:
    """What comes out is attention over what was stored."""
    rng = np.random.default_rng(4)
    cache = KVCacheSpec(8, 16, 2, 128, "int8", layout)
    q = rng.normal(size=(16, 4, 128)).astype(jnp.bfloat16)
    old = rng.integers(-90, 90, (2, 8, 16, 2, 128)).astype(np.int8)
    new = rng.normal(size=(2, 16, 2, 128)).astype(jnp.bfloat16)
    scales = {"k_scale": 0.02, "v_scale": np.array([0.03, 0.02], np.float32)}
    out, pages = pagemill.ragged_paged_attention(
        q,
        cache.pack(*old),
        RaggedBatch(**metadata()),
        k=new[0],
        v=new[1],
        kv_layout=layout,
        **scales,
    )
    stored = np.stack(cache.unpack(pages), axis=3).reshape(8, 16, 4, 128)
    want = oracle.ragged_paged_attention(
        q, stored, *bare(metadata()), sm_scale=128**-0.5, **scales
    )
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want, atol=2e-2, rtol=2e-2
    )
    written = np.asarray(stored[0, 12, 0::2], np.float64) * 0.02
    nearest = np.clip(new[0, 0].astype(np.float64), -128 * 0.02, 127 * 0.02)
    np.testing.assert_allclose(written, nearest, atol=0.01 + 1e-6)
    # C30: without k and v nothing is written.
    alone = pagemill.ragged_paged_attention(
        q, pages, RaggedBatch(**metadata()), kv_layout=layout, **scales
    )
    np.testing.assert_array_equal(alone, out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_value": -10.0}, "mask_value=-10.0 must be at most -1e30"),
        ({"k_scale": 0.0}, "k_scale=0.0 must be positive and finite"),
        ({"v_scale": np.nan}, "v_scale=nan must be positive and finite"),
        ({"k_scale": "x"}, "k_scale='x' must be a number"),
        ({"k_scale": np.ones(3, np.float32)}, "k_scale.shape=\\(3,\\)"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks.shape=\\(3,\\)"),
        ({"tree_mask": np.zeros((16, 1), np.int32)}, "`tree_mask` must be"),
        ({"tree_mask": np.zeros((15, 1), np.uint32)}, "tree_mask.shape"),
        ({"kv_layout": "rows"}, "kv_layout='rows' must be"),
        ({"kv_layout": "planes"}, "kv_pages.shape"),
        ({"num_kv_heads": 3}, "num_kv_heads=3 must be"),
    ],
    ids=str,
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    q, kv_pages = tensors()
    with pytest.raises(PagemillError, match=message):
        pagemill.ragged_paged_attention(
            q, kv_pages, RaggedBatch(**metadata()), **options
        )
