"""PagePool: reference counts, handles, and calls that fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pagemill import CapacityError, PagemillError, PagePool, Planner, Sequence


def make(pages: int = 8, page_size: int = 16) -> tuple[PagePool, Planner]:
    pool = PagePool(pages, page_size)
    return pool, Planner(
        pool, max_num_tokens=256, max_num_seqs=8, pages_per_seq=8
    )


def state(pool: PagePool, *sequences: Sequence) -> Any:
    pool.audit()
    return (
        pool.num_free_pages,
        pool.num_sequences,
        [pool.reference_count(p) for p in range(pool.total_num_pages)],
        [(s.length, s.pages.tolist()) for s in sequences],
    )


def test_life_of_a_sequence() -> None:
    pool, planner = make()
    seq = pool.open(range(20))
    assert (seq.length, seq.num_prompt_tokens, seq.num_cached_tokens) == (
        0,
        20,
        0,
    )
    planner.plan([(seq, 20)])
    assert seq.length == 20
    assert len(seq.pages) == 2
    assert pool.num_free_pages == 6
    assert [pool.reference_count(p) for p in seq.pages] == [1, 1]
    pool.close(seq)
    assert pool.num_free_pages == 8
    pool.audit()


def test_c83_closing_twice() -> None:
    pool, planner = make()
    kept, gone = pool.open(), pool.open()
    planner.plan([(kept, 20), (gone, 20)])
    pool.close(gone)
    before = state(pool, kept)
    for _ in range(2):
        with pytest.raises(PagemillError, match="closed"):
            pool.close(gone)
    assert state(pool, kept) == before
    assert "closed" in repr(gone)


def test_stale_handle_is_not_the_next_sequence() -> None:
    pool, planner = make()
    old = pool.open()
    planner.plan([(old, 1)])
    pool.close(old)
    new = pool.open()
    planner.plan([(new, 1)])
    with pytest.raises(PagemillError):
        planner.plan([(old, 1)])
    with pytest.raises(PagemillError):
        _ = old.length
    assert new.length == 1


def test_foreign_sequence() -> None:
    pool, planner = make()
    other, _ = make()
    seq = other.open()
    for call in (pool.close, pool.fork, lambda s: planner.plan([(s, 1)])):
        with pytest.raises(PagemillError, match="another pool"):
            call(seq)
    with pytest.raises(PagemillError, match="not a Sequence"):
        pool.close(3)  # type: ignore[arg-type]


def test_fork_shares_full_pages() -> None:
    pool, planner = make()
    seq = pool.open()
    planner.plan([(seq, 32)])
    twin = pool.fork(seq)
    assert twin.pages.tolist() == seq.pages.tolist()
    assert pool.take_page_copies().shape == (0, 2)
    planner.plan([(seq, 1), (twin, 1)])
    assert seq.pages[-1] != twin.pages[-1]
    pool.close(seq)
    assert [pool.reference_count(p) for p in twin.pages] == [1, 1, 1]
    pool.close(twin)
    assert pool.num_free_pages == 8
    pool.audit()


def test_fork_copies_a_partial_page() -> None:
    pool, planner = make()
    seq = pool.open()
    planner.plan([(seq, 20)])
    twin = pool.fork(seq)
    with pytest.raises(PagemillError, match="take_page_copies"):
        planner.plan([(twin, 1)])
    copies = pool.take_page_copies()
    assert copies.tolist() == [[seq.pages[1], twin.pages[1]]]
    assert seq.pages[0] == twin.pages[0]
    assert pool.take_page_copies().shape == (0, 2)
    planner.plan([(twin, 1)])
    pool.audit()


def test_fork_without_room_changes_nothing() -> None:
    pool, planner = make(pages=2)
    seq = pool.open()
    planner.plan([(seq, 20)])
    before = state(pool, seq)
    with pytest.raises(CapacityError) as info:
        pool.fork(seq)
    assert (info.value.need, info.value.free) == (1, 0)
    assert state(pool, seq) == before


def test_truncate() -> None:
    pool, planner = make()
    seq = pool.open()
    planner.plan([(seq, 40)])
    pool.truncate(seq, 33)
    assert len(seq.pages) == 3
    pool.truncate(seq, 32)
    assert len(seq.pages) == 2
    pool.truncate(seq, 0)
    assert pool.num_free_pages == 8
    for length in (1, -1):
        with pytest.raises(PagemillError, match=str(length)):
            pool.truncate(seq, length)


def test_truncate_into_a_shared_page() -> None:
    pool, planner = make()
    seq = pool.open()
    planner.plan([(seq, 32)])
    twin = pool.fork(seq)
    pool.truncate(twin, 20)
    assert twin.pages[1] != seq.pages[1]
    assert pool.take_page_copies().tolist() == [[seq.pages[1], twin.pages[1]]]
    pool.audit()


@pytest.mark.parametrize("tokens", [[1.5], "abc", [[1, 2]], [True], 7])
def test_open_refuses(tokens: Any) -> None:
    pool, _ = make()
    with pytest.raises(PagemillError, match="tokens"):
        pool.open(tokens)
    assert pool.num_sequences == 0


@pytest.mark.parametrize(
    ("pages", "page_size"),
    [
        (0, 16),
        (8, 0),
        (-1, 16),
        (8.0, 16),
        (True, 16),
        (2**31, 16),
        (2**30, 16),
        (2**70, 16),
    ],
)
def test_bad_sizes(pages: Any, page_size: Any) -> None:
    with pytest.raises(PagemillError):
        PagePool(pages, page_size)


def test_pages_are_a_copy() -> None:
    pool, planner = make()
    seq = pool.open()
    planner.plan([(seq, 20)])
    seq.pages[:] = -1
    assert np.all(seq.pages >= 0)


@pytest.mark.parametrize("page", [-1, 8])
def test_reference_count_range(page: int) -> None:
    pool, _ = make()
    with pytest.raises(PagemillError, match=str(page)):
        pool.reference_count(page)
