"""Peers' layouts: against naive loops, and there and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pagemill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill import layouts

SIZES = {"page_size": 4, "total_num_pages": 50, "max_num_tokens": 24}
DEAD = -77


def example(**changes: Any) -> pagemill.RaggedBatch:
    """5 tokens (2 new) on pages 7 3; none; 4 (1 new) on page 2; a dead row."""
    arrays = {
        "kv_lens": [5, 0, 4, DEAD],
        "page_indices": [
            [7, 3, DEAD],
            [DEAD, DEAD, DEAD],
            [2, DEAD, DEAD],
            [DEAD, DEAD, DEAD],
        ],
        "cu_q_lens": [0, 2, 2, 3, DEAD],
        "num_seqs": [3],
    }
    return pagemill.RaggedBatch(**{**arrays, **SIZES, **changes})


@st.composite
def batches(draw: Any) -> pagemill.RaggedBatch:
    """Batches as the planner writes them: dead rows and slots 0."""
    rows = draw(st.integers(1, 5))
    live = draw(st.integers(0, rows))
    lens = draw(st.lists(st.integers(0, 12), min_size=live, max_size=live))
    q_lens = [draw(st.integers(0, min(n, 4))) for n in lens]
    ids = draw(st.permutations(range(50)))
    table = np.zeros((rows, 3), np.int32)
    for row, n in enumerate(lens):
        for slot in range(-(-n // 4)):
            table[row, slot] = ids.pop()
    first = next((i for i, n in enumerate(q_lens) if n != 1), live)
    cu = np.concatenate([[0], np.cumsum(q_lens, dtype=np.int32)])
    slots = np.full(24, -1)
    for row, n in enumerate(lens):
        for i in range(q_lens[row]):
            at = n - q_lens[row] + i
            slots[cu[row] + i] = table[row, at // 4] * 4 + at % 4
    return pagemill.RaggedBatch(
        kv_lens=lens + [0] * (rows - live),
        page_indices=table,
        cu_q_lens=np.pad(cu, (0, rows - live), mode="edge"),
        num_seqs=[live],
        distribution=[first, first, live],
        slot_mapping=slots,
        **SIZES,
    )


def assert_same(a: Any, b: Any) -> None:
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(
            getattr(a, field.name), getattr(b, field.name), field.name
        )


def test_flat() -> None:
    flat = pagemill.as_flat(example())
    assert flat.page_indices.tolist() == [7, 3, 0, 0, 0, 0, 2, *[0] * 5]
    assert flat.kv_lens.tolist() == [5, 0, 4, 0]
    assert flat.cu_q_lens.tolist() == [0, 2, 2, 3, 3]
    assert flat.distribution.tolist() == [0, 0, 3]
    assert flat.page_indices.dtype == np.int32


def test_ragged() -> None:
    ragged = pagemill.as_ragged(example(), capacity=4)
    assert ragged.page_indices.tolist() == [7, 3, 2, 0]
    assert ragged.cu_kv_lens.tolist() == [0, 8, 8, 12, 12]
    assert ragged.kv_lens.tolist() == [5, 0, 4, 0]
    assert pagemill.as_ragged(example()).page_indices.size == 12


def test_indptr() -> None:
    indptr = pagemill.as_indptr(example(), capacity=3)
    assert indptr.qo_indptr.tolist() == [0, 2, 2, 3, 3]
    assert indptr.kv_indptr.tolist() == [0, 2, 2, 3, 3]
    assert indptr.kv_indices.tolist() == [7, 3, 2]
    assert indptr.last_page_len.tolist() == [1, 0, 4, 0]
    assert indptr.num_seqs.tolist() == [3]


@settings(deadline=None)
@given(batches())
def test_there_and_back(batch: pagemill.RaggedBatch) -> None:
    assert_same(pagemill.from_flat(pagemill.as_flat(batch)), batch)
    pages = int(-(-np.asarray(batch.kv_lens) // 4).sum())
    ragged = pagemill.as_ragged(batch, pages)
    assert_same(pagemill.from_ragged(ragged, pages_per_seq=3), batch)
    indptr = pagemill.as_indptr(batch, pages + 1)
    assert_same(pagemill.from_indptr(indptr, pages_per_seq=3), batch)
    for row in range(batch.num_seqs[0]):
        count = -(-batch.kv_lens[row] // 4)
        wanted = batch.page_indices[row, :count].tolist()
        begin = ragged.cu_kv_lens[row] // 4
        assert ragged.page_indices[begin : begin + count].tolist() == wanted
        begin, end = indptr.kv_indptr[row : row + 2]
        assert indptr.kv_indices[begin:end].tolist() == wanted


def test_of_the_planner_and_back() -> None:
    pool = pagemill.PagePool(16, 4)
    planner = pagemill.Planner(pool, 24, 3, 4)
    batch = planner.plan([(pool.open(), 9), (pool.open(), 1)])
    assert_same(pagemill.from_flat(pagemill.as_flat(batch)), batch)
    pagemill.validate(pagemill.from_indptr(pagemill.as_indptr(batch)))


@pytest.mark.parametrize("make", [pagemill.as_ragged, pagemill.as_indptr])
def test_refuses_a_capacity_that_is_too_small(make: Any) -> None:
    with pytest.raises(
        pagemill.PagemillError,
        match=r"capacity=2 must be at least 3, .* Raise capacity",
    ):
        make(example(), capacity=2)
    with pytest.raises(pagemill.PagemillError, match="capacity=-1 must be"):
        make(example(), capacity=-1)


@pytest.mark.parametrize(
    "make", [pagemill.as_flat, pagemill.as_ragged, pagemill.as_indptr]
)
def test_refuses_what_is_not_a_sound_batch(make: Any) -> None:
    with pytest.raises(pagemill.PagemillError, match="not a RaggedBatch"):
        make([1])
    with pytest.raises(pagemill.PagemillError, match="kv_len"):
        make(example(kv_lens=[5, 0, 400, 0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_kv_lens": [0, 8, 8, 11, 12]}, r"cu_kv_lens\[3\]=11 must be 12"),
        ({"cu_kv_lens": [0, 8, 8]}, "cu_kv_lens has 3 entries"),
        ({"page_indices": [7, 3]}, "have 3 pages"),
        ({"distribution": [0, 0, 5]}, "num_seqs=5"),
        ({"kv_lens": [5, 0, -4, 0], "cu_kv_lens": [0, 8, 8, 4, 4]}, "kv_len"),
        ({"page_indices": [[7, 3, 2]]}, "must be one-dimensional"),
        ({"page_size": 0}, "page_size=0 must be positive"),
    ],
)
def test_from_ragged_refuses(changes: Any, message: str) -> None:
    good = pagemill.as_ragged(example())
    with pytest.raises(pagemill.PagemillError, match=message):
        pagemill.from_ragged(dataclasses.replace(good, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"last_page_len": [0, 0, 4, 0]}, r"last_page_len\[0\]=0 must be in"),
        ({"last_page_len": [1, 0, 5, 0]}, r"last_page_len\[2\]=5 must be in"),
        ({"kv_indptr": [0, 2, 1, 3, 3]}, "never fall"),
        ({"kv_indptr": [0, 2, 2, 3]}, "kv_indptr has 4 entries"),
        ({"kv_indices": [7]}, "kv_indices has 1 entries"),
        ({"qo_indptr": [0, 2, 2, 9, 9]}, "q_len=7"),
    ],
)
def test_from_indptr_refuses(changes: Any, message: str) -> None:
    good = pagemill.as_indptr(example())
    with pytest.raises(pagemill.PagemillError, match=message):
        pagemill.from_indptr(dataclasses.replace(good, **changes))


def test_from_flat_refuses() -> None:
    good = pagemill.as_flat(example())
    with pytest.raises(pagemill.PagemillError, match="11 entries"):
        pagemill.from_flat(
            dataclasses.replace(good, page_indices=good.page_indices[1:])
        )


def test_refuses_a_table_that_is_too_narrow() -> None:
    with pytest.raises(
        pagemill.PagemillError, match="pages_per_seq=1 must be at least 2"
    ):
        pagemill.from_ragged(pagemill.as_ragged(example()), pages_per_seq=1)


def test_public_names_are_the_module_s() -> None:
    assert pagemill.as_flat is layouts.as_flat
    assert pagemill.IndptrLayout is layouts.IndptrLayout
