"""Work lists against a dense mask."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pagemill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill import PagemillError, WorkFlag

PAGE = 4


def make_batch(rows: list[tuple[int, int]]) -> pagemill.RaggedBatch:
    """Of (q_len, kv_len), with a dead row behind."""
    slots = max([1, *(-(-kv // PAGE) for _, kv in rows)])
    sums = np.cumsum([0, *(q for q, _ in rows)])
    return pagemill.RaggedBatch(
        kv_lens=[*(kv for _, kv in rows), -7],
        page_indices=np.zeros((len(rows) + 1, slots), np.int32),
        cu_q_lens=[*sums, -7],
        num_seqs=[len(rows)],
        page_size=PAGE,
        total_num_pages=1,
        max_num_tokens=max(int(sums[-1]), 1),
    )


def dense(
    rows: list[tuple[int, int]], *, causal: bool, window: int | None
) -> Any:
    """Visible pairs: [all queries, longest kv]."""
    width = max([1, *(kv for _, kv in rows)])
    keys = np.arange(width)
    mask = [np.zeros((0, width), bool)]
    for q_len, kv_len in rows:
        at = (kv_len - q_len + np.arange(q_len))[:, None]
        seen = np.broadcast_to(keys < kv_len, (q_len, width))
        if causal:
            seen = seen & (keys <= at)
        if window is not None:
            seen = seen & (keys > at - window)
        mask.append(seen)
    return np.concatenate(mask)


@st.composite
def row(draw: Any) -> tuple[int, int]:
    kv_len = draw(st.integers(0, 40))
    return draw(st.sampled_from([0, 1, kv_len // 2, kv_len])), kv_len


@settings(deadline=None, max_examples=200)
@given(
    st.lists(row().filter(lambda r: r[0] <= r[1]), max_size=4),
    st.integers(1, 12),
    st.integers(1, 3),
    st.booleans(),
    st.none() | st.integers(1, 20),
    st.none() | st.integers(1, 3),
)
def test_covers_what_is_visible_once(
    rows: list[tuple[int, int]],
    q_block: int,
    pages: int,
    causal: bool,
    window: int | None,
    blocks: int | None,
) -> None:
    kv_block = pages * PAGE
    work = pagemill.work_list(
        make_batch(rows),
        q_block=q_block,
        kv_block=kv_block,
        causal=causal,
        sliding_window=window,
        max_kv_per_item=blocks and blocks * kv_block,
    )
    assert work.items.dtype == np.int32
    assert work.items.shape == (work.num_items[0], 6)
    mask = dense(rows, causal=causal, window=window)
    covered = np.zeros(mask.shape, int)
    tiles: dict[Any, list[int]] = {}
    for r, q, q_end, kv, kv_end, flags in work.items.tolist():
        assert q_end - q <= q_block and kv % kv_block == 0
        assert blocks is None or kv_end - kv <= blocks * kv_block
        for block in range(kv, kv_end, kv_block):
            end = min(block + kv_block, kv_end)
            assert mask[q:q_end, block:end].any()
        covered[q:q_end, kv:kv_end] += 1
        tiles.setdefault((r, q, q_end), []).append(flags)
    assert (covered[mask] == 1).all() and covered.max(initial=0) <= 1
    assert list(tiles) == sorted(tiles)
    for flags in tiles.values():
        first, last = WorkFlag.FIRST, WorkFlag.LAST
        assert [f & first for f in flags] == [first] + [0] * (len(flags) - 1)
        assert [f & last for f in flags] == [0] * (len(flags) - 1) + [last]


def test_capacity() -> None:
    batch = make_batch([(1, 10), (5, 9)])
    sizes = {"q_block": 4, "kv_block": 4}
    work = pagemill.work_list(batch, **sizes, capacity=5)
    assert work.num_items.tolist() == [3]
    assert work.items[3:].tolist() == [[-1, 0, 0, 0, 0, 0]] * 2
    assert jax.tree.leaves(work) == [work.items, work.num_items]
    with pytest.raises(
        PagemillError, match=r"capacity=2 must be at least 3, .* Raise capacity"
    ):
        pagemill.work_list(batch, **sizes, capacity=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_block": 0}, "q_block=0 must be in range"),
        ({"q_block": 1.5}, "q_block=1.5 must be an integer"),
        ({"kv_block": 6}, "kv_block=6 must be a multiple of page_size=4"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        (
            {"max_kv_per_item": 6},
            "max_kv_per_item=6 must be a multiple of kv_block=4",
        ),
        ({"capacity": -1}, "capacity=-1"),
        ({"batch": None}, "not a RaggedBatch"),
    ],
)
def test_refuses(changes: Any, message: str) -> None:
    call = {"batch": make_batch([(1, 9)]), "q_block": 4, "kv_block": 4}
    with pytest.raises(PagemillError, match=message):
        pagemill.work_list(**{**call, **changes})
