"""compat.jax_ops: the public names, held against jax's own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as peer
from pagemill import PagemillError, SpecError
from pagemill.compat.jax_ops import ragged_paged_attention as ours

from tests.python.b0 import i32

ARRAYS = (
    "q",
    "kv_pages",
    "kv_lens",
    "page_indices",
    "cu_q_lens",
    "num_seqs",
)


def call(**changes: Any) -> dict[str, Any]:
    """A prefill of 8 tokens of 20 and a decode at 9, with room for one more."""
    return {
        "q": jnp.ones((16, 4, 128), jnp.float32),
        "kv_pages": jnp.ones((8, 16, 4, 128), jnp.float32),
        "kv_lens": i32(20, 9, 0),
        "page_indices": np.array([[0, 1], [2, 3], [4, 5]], np.int32),
        "cu_q_lens": i32(0, 8, 9, 9),
        "num_seqs": i32(2),
        **changes,
    }


def give(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    rest = {n: v for n, v in arguments.items() if n not in ARRAYS}
    return function(*(arguments[name] for name in ARRAYS), **rest)


def plain(words: str) -> str:
    """Numbers as numbers, whatever array scalar they were printed from."""
    words = re.sub(r"Array\((-?\d+), dtype=int32\)", r"\1", words)
    return re.sub(r"np\.int32\((-?\d+)\)", r"\1", words)


def public_words(function: Callable[..., Any], arguments: Any) -> str:
    with pytest.raises(ValueError, match=r"\S") as info:
        give(function, arguments)
    return plain(str(info.value))


def our_error(function: Callable[..., Any], arguments: Any) -> PagemillError:
    with pytest.raises(PagemillError) as info:
        give(function, arguments)
    assert info.value.violations
    assert all(v.message and v.remedy for v in info.value.violations)
    first = info.value.violations[0]
    assert str(info.value).startswith(first.message)
    assert first.remedy in str(info.value)
    return info.value


STATIC = {
    "num_seqs": {"num_seqs": i32(2, 0)},
    "num_seqs scalar": {"num_seqs": np.int32(2)},
    "head_dim": {"q": jnp.ones((16, 4, 64))},
    "kv_lens": {"kv_lens": i32(20, 9)},
    "cu_q_lens": {"cu_q_lens": i32(0, 8, 9)},
    "kv_lens dtype": {"kv_lens": np.array([20, 9, 0], np.int64)},
    "pages dtype": {"page_indices": np.zeros((3, 2), np.uint32)},
    "cu_q_lens dtype": {"cu_q_lens": np.array([0, 8, 9, 9], np.int16)},
    "heads": {"q": jnp.ones((16, 5, 128))},
    "window": {"sliding_window": 0},
    "window negative": {"sliding_window": -3},
    "soft cap": {"soft_cap": 0.0},
    "pages per block": {"num_kv_pages_per_block": 0},
    "pages per block high": {"num_kv_pages_per_block": 3},
    "queries per block": {"num_queries_per_block": 0},
    "vmem": {"vmem_limit_bytes": 0},
}


@pytest.mark.parametrize("name", STATIC)
def test_static_conditions(name: str) -> None:
    arguments = call(**STATIC[name])
    for function in ("static_validate_inputs", "dynamic_validate_inputs"):
        words = public_words(getattr(peer, function), arguments)
        error = our_error(getattr(ours, function), arguments)
        assert str(error).startswith(words)
        assert isinstance(error, SpecError)


def test_all_static_problems_the_public_one_first() -> None:
    rng = np.random.default_rng(0)
    names = list(STATIC)
    for _ in range(100):
        chosen = rng.choice(names, 3, replace=False)
        arguments = call(sm_scale=-1.0)  # Ours alone, and never first.
        for name in chosen:
            arguments |= STATIC[name]
        words = public_words(peer.static_validate_inputs, arguments)
        error = our_error(ours.static_validate_inputs, arguments)
        assert str(error).startswith(words), chosen
        assert len(error.violations) >= 2
        assert "sm_scale=-1.0" in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_pages": jnp.ones((8, 16, 3, 128))},
            "num_combined_kv_heads=3 must be even",
        ),
        ({"k_scale": "x"}, "k_scale='x' must be a real number"),
        ({"v_scale": (1,)}, "v_scale=.* must be a real number"),
    ],
)
def test_what_the_public_validator_only_asserts(
    changes: dict[str, Any], words: str
) -> None:
    arguments = call(**changes)
    with pytest.raises(AssertionError):
        give(peer.static_validate_inputs, arguments)
    error = our_error(ours.static_validate_inputs, arguments)
    assert re.search(words, str(error))


DYNAMIC = {
    "num_seqs": {"num_seqs": i32(4)},
    "pages_per_seq": {"kv_lens": i32(20, 40, 0)},
    "two too long": {"kv_lens": i32(33, 90, 0)},
    "tokens": {"cu_q_lens": i32(0, 16, 17, 17)},
    "q_len": {"kv_lens": i32(20, 0, 0)},
    "q_len first": {"kv_lens": i32(4, 0, 0)},
    "length, tokens and q_len": {
        "kv_lens": i32(4, 40, 0),
        "cu_q_lens": i32(0, 16, 17, 17),
    },
    "tokens and q_len": {
        "kv_lens": i32(4, 9, 0),
        "cu_q_lens": i32(0, 16, 17, 17),
    },
}


@pytest.mark.parametrize("kind", ["numpy", "jax"])
@pytest.mark.parametrize("name", DYNAMIC)
def test_dynamic_conditions(name: str, kind: str) -> None:
    arguments = call(**DYNAMIC[name])
    if kind == "jax":
        arguments = {n: jnp.asarray(v) for n, v in arguments.items()}
    give(ours.static_validate_inputs, arguments)
    words = public_words(peer.dynamic_validate_inputs, arguments)
    error = our_error(ours.dynamic_validate_inputs, arguments)
    assert str(error).startswith(words)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sm_scale": 0.1, "sliding_window": 5, "soft_cap": 30.0},
        {"mask_value": -1e30, "k_scale": 0.5, "v_scale": 2.0},
        {"num_kv_pages_per_block": 2, "num_queries_per_block": 8},
        {"vmem_limit_bytes": 2**20},
        {"num_seqs": i32(0)},
        {"num_seqs": i32(3), "cu_q_lens": i32(0, 8, 9, 9)},
        {"q": jnp.ones((16, 4, 128), jnp.bfloat16)},
        {"kv_pages": jnp.ones((8, 16, 4, 128), jnp.float8_e4m3fn)},
        {"kv_pages": jnp.ones((8, 16, 4, 128), jnp.float8_e5m2)},
        {"kv_lens": i32(8, 1, 0)},
        {"cu_q_lens": i32(0, 8, 9, -7)},
        {"page_indices": np.array([[0, 1], [2, 99], [-4, 5]], np.int32)},
    ],
)
def test_good_inputs_pass_both(changes: dict[str, Any]) -> None:
    arguments = call(**changes)
    for module in (peer, ours):
        assert give(module.static_validate_inputs, arguments) is None
        assert give(module.dynamic_validate_inputs, arguments) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_indices": np.full((3, 2), 10**6, np.int32)}, "page_indices"),
        ({"page_indices": np.full((3, 2), -1, np.int32)}, "page_indices"),
        ({"page_indices": np.full((3, 2), 1, np.int32)}, "page 1 is written"),
        ({"cu_q_lens": i32(5, 8, 9, 9)}, r"cu_q_lens\[0\]=5"),
        ({"cu_q_lens": i32(0, 8, 4, 4)}, "cu_q_lens falls"),
        ({"num_seqs": i32(-1)}, r"num_seqs\[0\]=-1"),
    ],
)
def test_what_the_public_validator_lets_pass(
    changes: dict[str, Any], words: str
) -> None:
    arguments = call(**changes)
    give(peer.dynamic_validate_inputs, arguments)
    error = our_error(ours.dynamic_validate_inputs, arguments)
    assert re.search(words, str(error))


def test_dead_rows_may_hold_anything() -> None:
    arguments = call(kv_lens=i32(20, 9, 9999))
    assert "max_kv_len=9999" in public_words(
        peer.dynamic_validate_inputs, arguments
    )
    give(ours.dynamic_validate_inputs, arguments)


def test_heads_that_xla_cannot_tile() -> None:
    """The public op refuses them, not its validators; ours takes them."""
    arguments = call(
        q=jnp.ones((16, 6, 128)), kv_pages=jnp.ones((8, 16, 6, 128))
    )
    words = public_words(peer.ragged_paged_attention, arguments)
    assert words.startswith("Not implemented: num_combined_kv_heads=6")
    give(ours.static_validate_inputs, arguments)
    assert give(ours.ragged_paged_attention, arguments).shape == (16, 6, 128)


@pytest.mark.parametrize(
    "name",
    [
        "static_validate_inputs",
        "dynamic_validate_inputs",
        "ragged_paged_attention",
    ],
)
def test_signatures(name: str) -> None:
    own, theirs = (
        inspect.signature(getattr(module, name), eval_str=True).parameters
        for module in (ours, peer)
    )
    assert list(own.values()) == list(theirs.values())


def test_static_under_jit_and_dynamic_not() -> None:
    arguments = call()
    arrays = {n: arguments[n] for n in ARRAYS}

    @jax.jit
    def static(arrays: Any) -> Any:
        give(ours.static_validate_inputs, arrays)
        return arrays["q"]

    static(arrays)
    shapes = {
        n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in arrays.items()
    }
    give(ours.static_validate_inputs, shapes)
    with pytest.raises(PagemillError, match=r"traced.*host"):
        jax.jit(lambda a: give(ours.dynamic_validate_inputs, a))(arrays)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sm_scale": 128**-0.5},
        {"sm_scale": 0.1, "sliding_window": 5},
        {"sm_scale": 0.1, "soft_cap": 3.0},
        {"sm_scale": 0.1, "num_queries_per_block": 8, "mask_value": None},
    ],
)
def test_attends_as_the_public_reference(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    arguments = call(
        q=jnp.asarray(rng.normal(size=(16, 4, 128)), jnp.float32),
        kv_pages=jnp.asarray(rng.normal(size=(8, 16, 4, 128)), jnp.float32),
        **options,
    )
    rest = {n: v for n, v in arguments.items() if "_per_" not in n}
    arrays = {n: jnp.asarray(arguments[n]) for n in ARRAYS}
    expected = give(peer.ref_ragged_paged_attention, rest | arrays)
    for given in (arguments, arguments | arrays):
        out = give(ours.ragged_paged_attention, given)
        np.testing.assert_allclose(out[:9], expected, atol=1e-4, rtol=1e-4)
        assert not out[9:].any()


def test_scales_and_the_mask_value() -> None:
    plain = give(ours.ragged_paged_attention, call())
    scaled = give(
        ours.ragged_paged_attention,
        call(sm_scale=0.5, k_scale=2.0, v_scale=np.float32(3)),
    )
    np.testing.assert_allclose(scaled, 3 * plain, atol=1e-4, rtol=1e-4)
    usual = {"mask_value": ours.DEFAULT_MASK_VALUE, "k_scale": None}
    np.testing.assert_array_equal(
        give(ours.ragged_paged_attention, call(**usual)), plain
    )
    with pytest.raises(SpecError, match="mask_value=-1000000000"):
        give(ours.ragged_paged_attention, call(mask_value=-1e9))


def test_wrong_calls_of_the_op() -> None:
    with pytest.raises(PagemillError, match="q_len=8 must be less or equal"):
        give(ours.ragged_paged_attention, call(kv_lens=i32(4, 9, 0)))
    with pytest.raises(SpecError, match="num_q_heads=5 must be divisible"):
        give(ours.ragged_paged_attention, call(q=jnp.ones((16, 5, 128))))
    with pytest.raises(SpecError, match="kv_pages"):
        give(
            ours.ragged_paged_attention,
            call(kv_pages=jnp.ones((8, 16, 4, 128), jnp.bfloat16)),
        )
