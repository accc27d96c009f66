"""The static checks of ragged paged attention: texts, completeness, casts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagemill import SpecError, Tuning, spec
from pagemill.batch import BATCH
from pagemill.kernels.ragged_paged_attention.spec import (
    RAGGED_PAGED_ATTENTION,
    UPDATE_KV_PAGES,
)

SIZES = {"T": 16, "S": 2, "P": 2, "N": 8, "page": 16, "C": 4, "Hq": 4, "D": 128}
SIZES |= {"Dk": 128, "Dv": 128, "Hkv": 2, "Ks": 2, "Vs": 2, "W": 1}


def array(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def operands(**changes: Any) -> dict[str, Any]:
    return {
        "q": array((16, 4, 128)),
        "kv_pages": array((8, 16, 4, 128)),
        "kv_lens": array((2,), np.int32),
        "page_indices": array((2, 2), np.int32),
        "cu_q_lens": array((3,), np.int32),
        "num_seqs": array((1,), np.int32),
        **changes,
    }


def problems(attributes: Any = None, **changes: Any) -> list[str]:
    with pytest.raises(SpecError) as info:
        spec.check(RAGGED_PAGED_ATTENTION, operands(**changes), attributes)
    assert all(p.remedy for p in info.value.violations)
    return [p.message for p in info.value.violations]


def test_accepts() -> None:
    values = spec.check(RAGGED_PAGED_ATTENTION, operands())
    assert values["sm_scale"] == 128**-0.5
    assert values["causal"] is True
    assert values["sliding_window"] is values["soft_cap"] is None


# The words of the public kernel's static validator, each for its condition.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_seqs": array((2,), np.int32)},
            "num_seqs.shape=(2,) must be (1,)",
        ),
        ({"num_seqs": array((), np.int32)}, "num_seqs.shape=() must be (1,)"),
        (
            {"q": array((16, 4, 64))},
            "Q head_dim 64 must be the same as that of K/V 128.",
        ),
        (
            {"kv_lens": array((3,), np.int32)},
            "Expected kv_lens.shape=(3,) to be (2,) where `max_num_seqs` is "
            "`page_indices.shape[0]`.",
        ),
        (
            {"cu_q_lens": array((2,), np.int32)},
            "Expected cu_q_lens.shape=(2,) to be (3,)  where `max_num_seqs` "
            "is `page_indices.shape[0]`.",
        ),
        (
            {"page_indices": array((2, 2), np.int16)},
            "The dtype of `kv_lens`, `page_indices`, and `cu_q_lens` must be "
            "int32. Got kv_lens.dtype=dtype('int32'), "
            "page_indices.dtype=dtype('int16'), "
            "cu_q_lens.dtype=dtype('int32').",
        ),
        (
            {"q": array((16, 3, 128))},
            "num_q_heads=3 must be divisible by num_kv_heads=2",
        ),
    ],
)
def test_public_shape_messages(changes: dict[str, Any], message: str) -> None:
    assert problems(**changes) == [message]


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window=0 must be positive."),
        ({"sliding_window": -1}, "sliding_window=-1 must be positive."),
        ({"soft_cap": 0.0}, "soft_cap=0.0 must not be 0.0."),
        (
            {"num_kv_pages_per_block": 3},
            "num_kv_pages_per_block=3 must be in range (0, 2].",
        ),
        (
            {"num_kv_pages_per_block": 0},
            "num_kv_pages_per_block=0 must be in range (0, 2].",
        ),
        (
            {"num_queries_per_block": 0},
            "num_queries_per_block=0 must be positive.",
        ),
        ({"vmem_limit_bytes": -1}, "vmem_limit_bytes=-1 must be positive."),
    ],
)
def test_public_option_messages(
    attributes: dict[str, Any], message: str
) -> None:
    assert problems(attributes) == [message]


def test_odd_combined_heads() -> None:
    (message,) = problems(kv_pages=array((8, 16, 5, 128)))
    assert message.startswith("num_combined_kv_heads=5 must be even")


def test_all_problems_in_one_error() -> None:
    with pytest.raises(SpecError) as info:
        spec.check(
            RAGGED_PAGED_ATTENTION,
            operands(
                q=array((16, 3, 64)),
                kv_lens=array((3,), np.int32),
                num_seqs=array((2,), np.int32),
            ),
            {"soft_cap": -30.0},
        )
    arguments = {p.argument for p in info.value.violations}
    assert arguments == {"q", "kv_lens", "num_seqs", "soft_cap"}
    for problem in info.value.violations:
        assert problem.message in str(info.value)


# C43, C44: real scalars of any library, None as the default, no traps.
@pytest.mark.parametrize(
    "scale", [0.1, np.float32(0.1), np.float64(0.1), np.array(0.1), 1]
)
def test_real_scalars(scale: Any) -> None:
    values = spec.check(RAGGED_PAGED_ATTENTION, operands(), {"sm_scale": scale})
    assert type(values["sm_scale"]) is float
    assert values["sm_scale"] == pytest.approx(float(scale))


def test_jax_scalars() -> None:
    values = spec.check(
        RAGGED_PAGED_ATTENTION,
        operands(),
        {"sm_scale": jnp.float32(0.1), "sliding_window": jnp.int32(4)},
    )
    assert values["sm_scale"] == pytest.approx(0.1)
    assert values["sliding_window"] == 4


@pytest.mark.parametrize("window", [np.int64(4), 4])
def test_integer_scalars(window: Any) -> None:
    values = spec.check(
        RAGGED_PAGED_ATTENTION, operands(), {"sliding_window": window}
    )
    assert type(values["sliding_window"]) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sm_scale", 0.0),
        ("sm_scale", float("nan")),
        ("sm_scale", float("inf")),
        ("sm_scale", True),
        ("sm_scale", "0.1"),
        ("sm_scale", np.ones(2)),
        ("sliding_window", 4.0),
        ("sliding_window", 4.5),
        ("sliding_window", True),
        ("sliding_window", 2**31),
        ("soft_cap", -30.0),
        ("soft_cap", float("nan")),
        ("soft_cap", 1e-38),
        ("soft_cap", 1e300),
        ("sm_scale", 1e39),
        ("sm_scale", 1e-300),
        ("sm_scale", 10**400),
        ("causal", 1),
        ("vmem_limit_bytes", True),
    ],
)
def test_bad_options_are_named(name: str, value: Any) -> None:
    (message,) = problems({name: value})
    assert message.startswith(f"{name}=")


def test_traced_option() -> None:
    @jax.jit
    def traced(scale: jax.Array) -> int:
        (message,) = problems({"sm_scale": scale})
        assert "traced" in message
        return 0

    traced(jnp.float32(0.1))


def test_tuning_is_checked_through_the_op_fields() -> None:
    fields = {f.name for f in dataclasses.fields(Tuning)}
    assert fields <= {a.name for a in RAGGED_PAGED_ATTENTION.attributes}


@pytest.mark.parametrize("op", [RAGGED_PAGED_ATTENTION, UPDATE_KV_PAGES, BATCH])
def test_every_operand_is_checked(op: spec.OpSpec) -> None:
    """Each operand, broken in rank, size or dtype alone, is named."""
    good = {
        o.name: array(
            tuple(spec.evaluate(d, SIZES) for d in o.dims),
            np.dtype(o.dtypes[0]),
        )
        for o in op.operands
    }
    attributes = {"page_size": 16, "total_num_pages": 8, "max_num_tokens": 16}
    spec.check(op, good, attributes)
    for operand in op.operands:
        a = good[operand.name]
        broken = {
            "rank": array((*a.shape, 1), a.dtype),
            "dtype": array(a.shape, np.dtype(np.complex64)),
            "kind": [1, 2],
        }
        if not operand.optional:
            broken["missing"] = None
        for value in broken.values():
            with pytest.raises(SpecError) as info:
                spec.check(op, good | {operand.name: value}, attributes)
            named = {p.argument for p in info.value.violations}
            assert operand.name in named, (operand.name, value)
        for axis in range(len(a.shape)):
            shape = list(a.shape)
            shape[axis] += 1
            changed = good | {operand.name: array(tuple(shape), a.dtype)}
            try:
                spec.check(op, changed, attributes)
            except SpecError:
                continue
            # Only a letter that this operand alone binds may vary freely.
            letter = operand.dims[axis]
            users = [o.name for o in op.operands if letter in o.dims]
            assert users == [operand.name], (operand.name, axis)


def test_c41_page_table_beyond_scalar_memory() -> None:
    wide = operands(
        page_indices=array((256, 2048), np.int32),
        kv_lens=array((256,), np.int32),
        cu_q_lens=array((257,), np.int32),
    )
    whole = {"stream_page_table": False}
    spec.check(RAGGED_PAGED_ATTENTION, wide, platform="tpu")
    spec.check(RAGGED_PAGED_ATTENTION, wide, whole, platform="cpu")
    with pytest.raises(SpecError, match=r"\(256, 2048\).* bytes of scalar"):
        spec.check(RAGGED_PAGED_ATTENTION, wide, whole, platform="tpu")


def test_error_survives_pickling() -> None:
    import pickle

    with pytest.raises(SpecError) as info:
        spec.check(RAGGED_PAGED_ATTENTION, operands(q=array((16, 3, 128))))
    copy = pickle.loads(pickle.dumps(info.value))
    assert str(copy) == str(info.value)
    assert copy.violations == info.value.violations
