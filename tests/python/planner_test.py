"""Planner against a naive one in Python, over random runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pagemill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill import CapacityError, PagemillError, PagePool, Planner, Sequence


class NaivePlanner:
    """Lists and loops: one list of page ids and a length per sequence."""

    def __init__(self, page_size: int, tokens: int, seqs: int, width: int):
        self.page_size, self.tokens = page_size, tokens
        self.seqs, self.width = seqs, width

    def plan(
        self, rows: list[tuple[list[int], int, int]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """rows: (pages after the step, length after the step, new tokens)."""
        order = [i for i, r in enumerate(rows) if r[2] == 1]
        decodes = len(order)
        order += [i for i, r in enumerate(rows) if r[2] != 1]
        kv_lens = [0] * self.seqs
        table = [[0] * self.width for _ in range(self.seqs)]
        cu_q_lens = [0]
        slots = [-1] * self.tokens
        for row, index in enumerate(order):
            pages, length, count = rows[index]
            kv_lens[row] = length
            table[row][: len(pages)] = pages
            for i in range(count):
                position = length - count + i
                page = pages[position // self.page_size]
                slots[cu_q_lens[-1] + i] = (
                    page * self.page_size + position % self.page_size
                )
            cu_q_lens.append(cu_q_lens[-1] + count)
        cu_q_lens += [cu_q_lens[-1]] * (self.seqs - len(rows))
        arrays = {
            "kv_lens": kv_lens,
            "page_indices": table,
            "cu_q_lens": cu_q_lens,
            "num_seqs": [len(rows)],
            "distribution": [decodes, decodes, len(rows)],
            "slot_mapping": slots,
            "order": order,
        }
        return {n: np.array(a, np.int32) for n, a in arrays.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equals_naive_planner(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([1, 3, 16]))
    pool = PagePool(24, page_size)
    planner = Planner(pool, max_num_tokens=40, max_num_seqs=5, pages_per_seq=9)
    naive = NaivePlanner(page_size, 40, 5, 9)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 12))):
        for seq in list(live):
            if data.draw(st.integers(0, 5)) == 0:
                pool.close(seq)
                live.remove(seq)
        while len(live) < 5 and data.draw(st.booleans()):
            live.append(pool.open())
        chosen = [s for s in live if data.draw(st.booleans())]
        requests = [(s, data.draw(st.integers(1, 12))) for s in chosen]
        lengths = {id(s): s.length for s in live}
        free = pool.num_free_pages
        try:
            batch = planner.plan(requests)
        except (CapacityError, PagemillError):
            assert {id(s): s.length for s in live} == lengths
            assert pool.num_free_pages == free
            pool.audit()
            continue
        pool.audit()
        for seq, count in requests:
            assert seq.length == lengths[id(seq)] + count
            assert len(seq.pages) == -(-seq.length // page_size)
        expected = naive.plan(
            [(s.pages.tolist(), s.length, count) for s, count in requests]
        )
        for name, array in expected.items():
            found = planner.order if name == "order" else getattr(batch, name)
            np.testing.assert_array_equal(found, array, err_msg=name)
            assert found.dtype == np.int32
        pagemill.validate(batch)
    held = [p for s in live for p in s.pages]
    assert len(held) == len(set(held))
    assert pool.num_free_pages == 24 - len(held)


def make(**sizes: int) -> tuple[PagePool, Planner]:
    pool = PagePool(sizes.pop("pages", 64), 16)
    defaults = {"max_num_tokens": 64, "max_num_seqs": 4, "pages_per_seq": 4}
    return pool, Planner(pool, **defaults | sizes)


def test_decodes_come_first() -> None:
    pool, planner = make()
    a, b, c = pool.open(), pool.open(), pool.open()
    planner.plan([(a, 5), (b, 3), (c, 7)])
    batch = planner.plan([(a, 6), (b, 1), (c, 1)])
    assert planner.order.tolist() == [1, 2, 0]
    assert batch.distribution.tolist() == [2, 2, 3]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 8, 8]
    assert batch.kv_lens.tolist() == [4, 8, 11, 0]


def test_idle_step() -> None:
    _, planner = make()
    batch = planner.plan([])
    assert batch.num_seqs.tolist() == [0]
    assert batch.slot_mapping.tolist() == [-1] * 64
    pagemill.validate(batch)


@pytest.mark.parametrize("count", [0, -1, 1.0, True, None, 2**40, 2**70])
def test_bad_counts_change_nothing(count: Any) -> None:
    pool, planner = make()
    good, bad = pool.open(), pool.open()
    with pytest.raises(PagemillError) as info:
        planner.plan([(good, 4), (bad, count)])
    assert "1" in str(info.value)
    assert (good.length, bad.length, pool.num_free_pages) == (0, 0, 64)


def refused(planner: Planner, requests: Any) -> str:
    pool = planner.pool
    free = pool.num_free_pages
    with pytest.raises(PagemillError) as info:
        planner.plan(requests)
    assert pool.num_free_pages == free
    pool.audit()
    return str(info.value)


def test_what_does_not_fit_is_named() -> None:
    pool, planner = make()
    seqs = [pool.open() for _ in range(5)]
    text = refused(planner, [(s, 1) for s in seqs])
    assert "5" in text and "max_num_seqs=4" in text
    text = refused(planner, [(seqs[0], 40), (seqs[1], 25)])
    assert "25 tokens after 40" in text and "max_num_tokens=64" in text
    planner.plan([(seqs[0], 60)])
    text = refused(planner, [(seqs[1], 1), (seqs[0], 5)])
    assert "pages_per_seq=4" in text
    text = refused(planner, [(seqs[1], 1), (seqs[1], 2)])
    assert "twice" in text
    for seq in seqs[1:]:
        assert seq.length == 0


def test_pool_shortage_is_data() -> None:
    pool, planner = make(pages=3)
    a, b = pool.open(), pool.open()
    with pytest.raises(CapacityError) as info:
        planner.plan([(a, 32), (b, 32)])
    assert (info.value.need, info.value.free) == (4, 3)
    assert (a.length, b.length, pool.num_free_pages) == (0, 0, 3)
    planner.plan([(a, 32)])


def test_batches_keep_their_arrays() -> None:
    pool, planner = make()
    seq = pool.open()
    first = planner.plan([(seq, 5)])
    kept = first.slot_mapping.copy()
    second = planner.plan([(seq, 1)])
    np.testing.assert_array_equal(first.slot_mapping, kept)
    assert not np.shares_memory(first.kv_lens, second.kv_lens)
    assert first.kv_lens.ctypes.data % 64 == 0


@pytest.mark.parametrize("pair", [3, (1, 2, 3), None])
def test_malformed_requests(pair: Any) -> None:
    _, planner = make()
    with pytest.raises(PagemillError, match=r"requests\[0\]"):
        planner.plan([pair])


@pytest.mark.parametrize("requests", [5, None])
def test_requests_that_are_no_list(requests: Any) -> None:
    _, planner = make()
    with pytest.raises(PagemillError, match="requests is a"):
        planner.plan(requests)


@pytest.mark.parametrize(
    "name", ["max_num_tokens", "max_num_seqs", "pages_per_seq"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, 2**31, None])
def test_bad_planner_sizes(name: str, value: Any) -> None:
    with pytest.raises(PagemillError, match=name):
        make(**{name: value})
