"""validate(): what it accepts, what it names, and in which words."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pagemill
import pytest
from pagemill import CheckCode, PagemillError, RaggedBatch

from tests.python.b0 import i32, metadata, with_rows


def violations(**batch: Any) -> tuple[Any, ...]:
    with pytest.raises(PagemillError) as info:
        pagemill.validate(**batch)
    assert info.value.violations
    first = info.value.violations[0]
    assert str(info.value).startswith(first.message)
    assert all(v.remedy for v in info.value.violations)
    assert first.remedy in str(info.value)
    return info.value.violations


def only(**batch: Any) -> Any:
    (violation,) = violations(**batch)
    return violation


def test_good_batch() -> None:
    pagemill.validate(**metadata())
    pagemill.validate(RaggedBatch(**metadata()))
    pagemill.validate(RaggedBatch(**metadata()), level="structure")
    pagemill.validate(**metadata(num_seqs=2))


# The words of the public kernel's dynamic validator, each for its condition.
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_seqs": i32(3)},
            "num_seqs[0]=3 must be less or equal to max_num_seqs=2",
        ),
        (
            {"kv_lens": i32(40, 9)},
            "pages_per_seq=2 must be greater or equal to min_pages_per_seq=3 "
            "given max_kv_len=40 and page_size=16.",
        ),
        (
            {"cu_q_lens": i32(0, 16, 17), "kv_lens": i32(32, 9)},
            "Total q tokens 17 must be less or equal to "
            "max_num_batched_tokens=16.",
        ),
        (
            {"kv_lens": i32(4, 9)},
            "q_len=8 must be less or equal to kv_len=4 at sequence 0.",
        ),
    ],
)
def test_public_messages(changes: dict[str, Any], message: str) -> None:
    assert only(**metadata(**changes)).message.startswith(message)


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_c01_page_out_of_range(page: int) -> None:
    found = only(**metadata(page_indices=np.array([[0, 1], [page, 3]], "i4")))
    assert (found.sequence, found.value, found.limit) == (1, page, 8)
    assert "page_indices[1, 0]" in found.message
    assert "[0, 8)" in found.message


@pytest.mark.parametrize("page", [99, -1])
def test_c03_dead_slots_are_ignored(page: int) -> None:
    pagemill.validate(
        **metadata(page_indices=np.array([[0, 1], [2, page]], np.int32))
    )


def test_c04_cu_q_lens_falls() -> None:
    found = violations(
        **with_rows(
            3,
            cu_q_lens=i32(0, 8, 4, 9),
            kv_lens=i32(20, 9, 9),
            num_seqs=i32(3),
        )
    )[0]
    assert found.sequence == 1
    assert "8" in found.message and "4" in found.message


@pytest.mark.parametrize("start", [2, -3])
def test_c06_cu_q_lens_starts_elsewhere(start: int) -> None:
    found = violations(**metadata(cu_q_lens=i32(start, 8, 9)))[0]
    assert f"cu_q_lens[0]={start}" in found.message


def test_c06_cu_q_lens_is_short() -> None:
    with pytest.raises(PagemillError, match=r"cu_q_lens\.shape=\(2,\)") as e:
        pagemill.validate(**metadata(cu_q_lens=i32(0, 8)))
    assert "(3,)" in str(e.value) and "max_num_seqs + 1" in str(e.value)


def test_c07_remedy() -> None:
    found = only(**metadata(kv_lens=i32(4, 9)))
    assert "already include" in found.remedy


@pytest.mark.parametrize("distribution", [None, i32(0, 0, 0)])
def test_c09_idle_step(distribution: Any) -> None:
    pagemill.validate(**metadata(num_seqs=i32(0), distribution=distribution))


def test_c10_num_seqs_negative() -> None:
    found = only(**metadata(num_seqs=i32(-1)))
    assert "-1" in found.message and "2" in found.message


@pytest.mark.parametrize(
    "distribution", [i32(-1, 0, 2), i32(3, 2, 2), i32(0, 0, 3), i32(0, 2, 1)]
)
def test_c10_distribution_order(distribution: Any) -> None:
    found = violations(**metadata(distribution=distribution))[0]
    assert "distribution" in found.message


def test_c11_rows_behind_num_seqs_are_ignored() -> None:
    rows = with_rows(4, kv_lens=i32(20, 9, -5, 9999))
    rows["page_indices"][2:] = -7
    rows["cu_q_lens"][3:] = -9
    pagemill.validate(**rows)


def test_c13_decode_range() -> None:
    three = with_rows(
        3, kv_lens=i32(20, 9, 5), cu_q_lens=i32(0, 8, 9, 12), num_seqs=i32(3)
    )
    for distribution in (i32(3, 3, 3), i32(1, 1, 3)):
        found = violations(**three, distribution=distribution)[0]
        assert found.sequence == 0
        assert "8" in found.message
        pagemill.validate(**three, distribution=distribution, level="structure")


def test_c15_two_writers() -> None:
    found = violations(
        **metadata(page_indices=np.array([[0, 1], [1, 3]], np.int32))
    )[0]
    assert "page 1" in found.message
    assert "copy" in found.remedy
    assert "0" in found.message and "1" in found.message


def test_c15_shared_prefix_is_fine() -> None:
    pagemill.validate(
        **metadata(
            page_indices=np.array([[0, 1], [0, 2]], np.int32),
            kv_lens=i32(20, 20),
            cu_q_lens=i32(0, 1, 2),
        )
    )


def test_written_page_read_by_another() -> None:
    assert violations(
        **metadata(
            page_indices=np.array([[0, 1], [1, 2]], np.int32),
            kv_lens=i32(20, 20),
            cu_q_lens=i32(0, 1, 2),
        )
    )


def test_c18_names_the_sequence() -> None:
    found = only(**metadata(kv_lens=i32(20, 40)))
    assert found.sequence == 1
    assert "sequence 1" in found.message


# C31: other integers are fine while their values fit.
@pytest.mark.parametrize(
    "dtype", [np.int64, np.uint32, np.int16, ">i4", "list"]
)
def test_c31_other_integers(dtype: Any) -> None:
    arrays = {
        name: value
        for name, value in metadata().items()
        if isinstance(value, np.ndarray)
    }
    for name, value in arrays.items():
        arrays[name] = (
            value.tolist() if dtype == "list" else value.astype(dtype)
        )
    pagemill.validate(**metadata(**arrays))
    batch = RaggedBatch(**metadata(**arrays))
    assert batch.kv_lens.dtype == np.int32
    assert batch.kv_lens.dtype.isnative
    np.testing.assert_array_equal(batch.page_indices, [[0, 1], [2, 3]])


@pytest.mark.parametrize("value", [2**31 + 1, -(2**31) - 1, 2**70])
def test_c31_never_wrapped(value: int) -> None:
    pages = [[0, 1], [2, value]]
    with pytest.raises(PagemillError, match=r"page_indices\[1, 1\]") as info:
        pagemill.validate(**metadata(page_indices=pages))
    assert str(value) in str(info.value)
    with pytest.raises(PagemillError):
        RaggedBatch(**metadata(page_indices=pages))


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 2)), np.zeros((2, 2), bool), [["a", "b"], ["c", "d"]]],
)
def test_not_integers(value: Any) -> None:
    with pytest.raises(PagemillError, match="page_indices"):
        pagemill.validate(**metadata(page_indices=value))


def test_ragged_list() -> None:
    with pytest.raises(PagemillError, match="page_indices"):
        pagemill.validate(**metadata(page_indices=[[0, 1], [2]]))


def test_c33_under_jit() -> None:
    @jax.jit
    def step(kv_lens: jax.Array) -> jax.Array:
        pagemill.validate(**metadata(kv_lens=kv_lens))
        return kv_lens

    with pytest.raises(PagemillError, match=r"kv_lens.*host"):
        step(jnp.asarray([20, 9], jnp.int32))


def test_jax_arrays() -> None:
    arrays = {
        name: jnp.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in metadata().items()
    }
    pagemill.validate(**arrays)
    bad = arrays | {"kv_lens": jnp.asarray([4, 9], jnp.int32)}
    assert only(**bad).sequence == 0


# C101: strides, order and flags of the caller's arrays do not matter.
@pytest.mark.parametrize(
    "view",
    [
        np.repeat(i32(0, 1, 2, 3).reshape(2, 2), 2, axis=1)[:, ::2],
        np.array([[0, 2], [1, 3]], np.int32).T,
        np.array([[2, 3], [0, 1]], np.int32)[::-1],
    ],
)
def test_c101_strided(view: Any) -> None:
    pagemill.validate(**metadata(page_indices=view))
    bad = view.copy()
    bad[1, 0] = 77
    strided = np.repeat(bad, 2, axis=1)[:, ::2]
    assert only(**metadata(page_indices=strided)).value == 77


def test_c101_read_only() -> None:
    pages = np.array([[0, 1], [2, 3]], np.int32)
    pages.flags.writeable = False
    pagemill.validate(**metadata(page_indices=pages))


def test_contiguous_int32_is_not_copied() -> None:
    arrays = metadata()
    batch = RaggedBatch(**arrays)
    assert np.shares_memory(batch.page_indices, arrays["page_indices"])


@pytest.mark.parametrize(
    "name", ["page_size", "total_num_pages", "max_num_tokens"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, True, 2**31, "16"])
def test_bad_sizes(name: str, value: Any) -> None:
    with pytest.raises(PagemillError, match=name):
        pagemill.validate(**metadata(**{name: value}))


def test_argument_mistakes() -> None:
    with pytest.raises(PagemillError, match="lacks page_indices"):
        pagemill.validate(
            kv_lens=[1],
            cu_q_lens=[0, 1],
            num_seqs=1,
            page_size=1,
            total_num_pages=1,
            max_num_tokens=1,
        )
    with pytest.raises(PagemillError, match="one or the other"):
        pagemill.validate(RaggedBatch(**metadata()), kv_lens=[1])
    with pytest.raises(PagemillError, match="RaggedBatch"):
        pagemill.validate([1, 2])  # type: ignore[arg-type]
    for level in ("all", ["full"], None):
        with pytest.raises(PagemillError, match="level"):
            pagemill.validate(**metadata(), level=level)


def test_slot_mapping() -> None:
    right = i32(*range(12, 16), *range(16, 20), 32 + 8, *[-1] * 7)
    pagemill.validate(**metadata(slot_mapping=right))
    wrong = right.copy()
    wrong[8] = 100
    found = only(**metadata(slot_mapping=wrong))
    assert found.code == CheckCode.SLOT_MAPPING
    assert (found.sequence, found.index, found.value) == (1, 8, 100)
    wrong = right.copy()
    wrong[15] = 3
    assert "dead token" in only(**metadata(slot_mapping=wrong)).message


def test_violations_survive_pickling() -> None:
    import pickle

    with pytest.raises(PagemillError) as info:
        pagemill.validate(**metadata(kv_lens=i32(4, 9)))
    copy = pickle.loads(pickle.dumps(info.value))
    assert str(copy) == str(info.value)
    assert copy.violations[0].message == info.value.violations[0].message
    assert copy.violations[0].code == info.value.violations[0].code


def test_values_that_are_not_there() -> None:
    shapes = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype)
        for name, value in metadata().items()
        if isinstance(value, np.ndarray)
    }
    with pytest.raises(PagemillError, match="ShapeDtypeStruct"):
        pagemill.validate(**metadata(**shapes))


@pytest.mark.parametrize("shape", [(0, 2), (2, 0)])
def test_empty_tables(shape: tuple[int, int]) -> None:
    with pytest.raises(PagemillError, match="dimension of 0"):
        pagemill.validate(
            **metadata(
                page_indices=np.zeros(shape, np.int32),
                kv_lens=np.zeros(shape[0], np.int32),
                cu_q_lens=np.zeros(shape[0] + 1, np.int32),
                num_seqs=0,
            )
        )


def test_pages_beyond_any_table_are_not_counted() -> None:
    """Memory follows the arrays, not total_num_pages."""
    huge = {"page_size": 1, "total_num_pages": 2**31 - 1}
    pages = np.array([[5, 2**31 - 2], [7, 8]], np.int32)
    batch = {
        "kv_lens": i32(2, 1),
        "cu_q_lens": i32(0, 2, 3),
        "page_indices": pages,
    }
    pagemill.validate(**metadata(**huge, **batch))
    pages[1, 0] = 5
    assert only(**metadata(**huge, **batch)).code == (
        CheckCode.PAGE_WRITTEN_TWICE
    )


def test_all_offenders_in_order() -> None:
    rows = with_rows(
        4,
        kv_lens=i32(20, 9, 3, 40),
        cu_q_lens=i32(0, 8, 9, 13, 14),
        num_seqs=i32(4),
    )
    rows["page_indices"][0, 0] = 50
    rows["page_indices"][1, 0] = -2
    found = violations(**rows)
    assert [v.sequence for v in found] == [0, 1, 2, 3]


def test_each_code_has_text() -> None:
    from pagemill import _core

    for code, level, summary, remedy in _core.checks():
        assert isinstance(code, CheckCode)
        assert level in (_core.Level.STRUCTURE, _core.Level.FULL)
        assert summary and remedy


def test_c91_cheap_and_complete() -> None:
    seqs, pages = 4096, 64
    table = np.random.default_rng(0).permutation(seqs * pages).astype(np.int32)
    good = {
        "kv_lens": np.full(seqs, pages * 16, np.int32),
        "page_indices": table.reshape(seqs, pages),
        "cu_q_lens": np.arange(seqs + 1, dtype=np.int32),
        "num_seqs": np.array([seqs], np.int32),
        "distribution": np.array([seqs, seqs, seqs], np.int32),
        "page_size": 16,
        "total_num_pages": seqs * pages,
        "max_num_tokens": seqs,
    }
    pagemill.validate(**good)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        pagemill.validate(**good)
        times.append(time.perf_counter() - start)
    # About 1 ms on a quiet core; the bound leaves room for a busy machine.
    assert min(times) < 5e-3, times

    bad = {
        n: v.copy() if n != "page_size" and hasattr(v, "copy") else v
        for n, v in good.items()
    }
    bad["page_indices"][7, 3] = -1
    bad["page_indices"][100, 63] = bad["page_indices"][99, 63]
    bad["kv_lens"][2000] = 0
    bad["page_indices"][3000, 5] = seqs * pages
    bad["kv_lens"][4000] = 64 * 16 + 1
    found = violations(**bad)
    named = {v.sequence for v in found}
    assert {7, 2000, 3000, 4000} <= named
    assert named & {99, 100}
    assert len(found) == 5, [v.message for v in found]
    assert [v.sequence for v in found] == sorted(v.sequence for v in found)


def test_c89_window_rows_pass_only_with_the_window() -> None:
    # Slots 0 and 1 were given back and belong to the second row by now.
    arrays: dict[str, Any] = {
        "kv_lens": [100, 20],
        "page_indices": [[5, 6, 2, 3, 4, 7, 8], [5, 6, 0, 0, 0, 0, 0]],
        "cu_q_lens": [0, 1, 5],
        "num_seqs": 2,
        "page_size": 16,
        "total_num_pages": 16,
        "max_num_tokens": 8,
    }
    pagemill.validate(**arrays, sliding_window=32)
    with pytest.raises(PagemillError, match="page 6 is written") as caught:
        pagemill.validate(**arrays)
    assert caught.value.violations[0].sequence == 0
    arrays["page_indices"][0][:2] = [-1, 99]
    pagemill.validate(**arrays, sliding_window=32)
    with pytest.raises(PagemillError, match=r"page_indices\[0, 0\]=-1"):
        pagemill.validate(**arrays)


@pytest.mark.parametrize("window", [0, -1, 2**31, 1.5, True])
def test_bad_windows(window: Any) -> None:
    with pytest.raises(PagemillError, match="sliding_window"):
        pagemill.validate(**metadata(), sliding_window=window)


def test_smem_budget_of_a_tpu() -> None:
    large = {
        "kv_lens": np.zeros(1024, np.int32),
        "page_indices": np.zeros((1024, 512), np.int32),
        "cu_q_lens": np.zeros(1025, np.int32),
        "num_seqs": 0,
        "page_size": 16,
        "total_num_pages": 16,
        "max_num_tokens": 8,
    }
    pagemill.validate(**large)
    pagemill.validate(**large, tpu="v6e", level="structure")
    with pytest.raises(
        PagemillError, match=r"Used 2\.\d+M of 0\.99M smem"
    ) as e:
        pagemill.validate(**large, tpu="v6e")
    assert e.value.violations[0].code == CheckCode.SMEM_BUDGET
    with pytest.raises(PagemillError, match="tpu='v3' must be one of v4"):
        pagemill.validate(**large, tpu="v3")
