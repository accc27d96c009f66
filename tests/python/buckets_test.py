"""Ladders of buckets and step sizes, against naive loops."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pagemill
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagemill import buckets

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def padded(sizes: list[int], ladder: Any) -> int:
    return sum(min(b for b in ladder if b >= n) - n for n in sizes)


def naive_split(
    remaining: list[int], budget: int, limit: int, multiple: int
) -> list[int]:
    counts = [0] * len(remaining)
    decodes = [i for i, n in enumerate(remaining) if n == 1]
    prompts = [i for i, n in enumerate(remaining) if n > 1]
    for i in decodes + prompts:
        if limit == 0 or budget == 0:
            break
        count = min(remaining[i], budget)
        if count < remaining[i] and count >= multiple:
            count -= count % multiple
        counts[i] = count
        if count < remaining[i]:
            break
        budget -= count
        limit -= 1
    return counts


def naive_steps(
    requests: list[tuple[int, int]], budget: int, seats: int, multiple: int
) -> list[tuple[int, int]]:
    waiting, running, steps = [list(r) for r in requests], [], []
    while waiting or running:
        while waiting and len(running) < seats:
            running.append(waiting.pop(0))
        counts = naive_split(
            [p or 1 for p, _ in running], budget, seats, multiple
        )
        steps.append((sum(counts), sum(c > 0 for c in counts)))
        for request, count in zip(running, counts, strict=True):
            if request[0]:
                request[0] -= count
                produced = request[0] == 0 and count > 0
            else:
                produced = count > 0
            request[1] -= produced
        running = [r for r in running if r[1] > 0]
    return steps


@settings(deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(1, 5))
def test_pads_least(sizes: list[int], count: int, multiple: int) -> None:
    plan = pagemill.propose_buckets(sizes, count, multiple_of=multiple)
    assert list(plan.buckets) == sorted(set(plan.buckets))
    assert len(plan.buckets) <= count
    assert all(b % multiple == 0 for b in plan.buckets)
    values = sorted({-(-n // multiple) * multiple for n in sizes})
    best = min(
        padded(sizes, (*ladder, values[-1]))
        for k in range(min(count, len(values)))
        for ladder in itertools.combinations(values[:-1], k)
    )
    found = padded(sizes, plan.buckets)
    assert found == best
    assert plan.padding == pytest.approx(found / (found + sum(sizes)))


def test_close_values_are_merged_and_lose_little() -> None:
    rng = np.random.default_rng(0)
    sizes = np.unique(rng.integers(1, 10_000, 5_000))
    assert sizes.size > 2_000
    values, counts = buckets._merge_close(sizes, np.ones_like(sizes))
    assert values.size <= 512
    assert counts.sum() == sizes.size
    assert np.diff(values).min() > 0
    assert np.isin(values, sizes).all()
    plan = pagemill.propose_buckets(sizes, 8)
    assert plan.buckets[-1] == sizes.max()
    ideal = np.ceil(np.arange(1, 9) * sizes.max() / 8).astype(int)
    even = padded(sizes.tolist(), ideal.tolist())
    assert padded(sizes.tolist(), plan.buckets) <= even * 1.01


def test_counts_programs() -> None:
    tokens = pagemill.propose_buckets([1, 2, 3, 9], 3)
    assert tokens.programs == len(tokens.buckets) == 3
    seqs = pagemill.propose_buckets(iter([1, 5]), 8, other=tokens)
    assert seqs == pagemill.BucketPlan((1, 5), 0.0, 6)


def test_fits_a_planner() -> None:
    tokens, seqs = pagemill.trace_step_sizes([(40, 8), (7, 3), (90, 1)], 32, 2)
    by_tokens = pagemill.propose_buckets(tokens, 3, multiple_of=8)
    by_seqs = pagemill.propose_buckets(seqs, 2, other=by_tokens)
    planner = pagemill.Planner(
        pagemill.PagePool(64, 4),
        by_tokens.buckets[-1],
        by_seqs.buckets[-1],
        32,
        token_buckets=by_tokens.buckets,
        seq_buckets=by_seqs.buckets,
    )
    assert planner.max_num_tokens == 32


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.integers(0, 30) | st.just(1), max_size=10),
    st.integers(0, 50),
    st.none() | st.integers(0, 8),
    st.integers(1, 9),
)
def test_split_is_the_naive_one(
    remaining: list[int], budget: int, limit: int | None, multiple: int
) -> None:
    counts = pagemill.split_by_budget(
        remaining, budget, max_num_seqs=limit, chunk_multiple=multiple
    )
    assert counts.dtype == np.int32
    assert counts.tolist() == naive_split(
        remaining, budget, len(remaining) if limit is None else limit, multiple
    )


def test_split() -> None:
    split = pagemill.split_by_budget([500, 1, 300, 1, 0], 100)
    assert split.tolist() == [98, 1, 0, 1, 0]
    split = pagemill.split_by_budget([500, 1, 300], 100, chunk_multiple=64)
    assert split.tolist() == [64, 1, 0]
    split = pagemill.split_by_budget([500, 1], 9, chunk_multiple=64)
    assert split.tolist() == [8, 1]
    # Sums past int32 are no sums that wrap.
    huge = np.full(4, 2**31 - 1, np.int32)
    assert pagemill.split_by_budget(huge, 2**31 - 1).tolist()[1:] == [0, 0, 0]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_trace_is_the_naive_one(
    requests: list[tuple[int, int]], budget: int, seats: int, multiple: int
) -> None:
    tokens, seqs = pagemill.trace_step_sizes(
        requests, budget, seats, chunk_multiple=multiple
    )
    assert tokens.dtype == seqs.dtype == np.int32
    steps = list(zip(tokens.tolist(), seqs.tolist(), strict=True))
    assert steps == naive_steps(requests, budget, seats, multiple)
    assert tokens.sum() == sum(p + n - 1 for p, n in requests)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pagemill.propose_buckets([], 2), "at least one entry"),
        (lambda: pagemill.propose_buckets([3, 0], 2), r"sizes\[1\]=0 must be"),
        (lambda: pagemill.propose_buckets([3], 0), "max_buckets=0 must be"),
        (
            lambda: pagemill.propose_buckets([2**31 - 1], 1, multiple_of=2),
            "rounds a size up to 2147483648",
        ),
        (lambda: pagemill.propose_buckets(7, 2), "one-dimensional"),
        (lambda: pagemill.split_by_budget([2, -1], 4), r"remaining\[1\]=-1"),
        (lambda: pagemill.split_by_budget([[2]], 4), "one-dimensional"),
        (lambda: pagemill.split_by_budget([2], -4), "budget=-4"),
        (
            lambda: pagemill.split_by_budget([2], 4, chunk_multiple=0),
            "chunk_multiple=0",
        ),
        (
            lambda: pagemill.trace_step_sizes([(1, 0)], 4, 4),
            r"requests\[0\]=\(1, 0\): the output must be at least 1",
        ),
        (lambda: pagemill.trace_step_sizes([1, 2], 4, 4), "must be pairs"),
        (lambda: pagemill.trace_step_sizes([(1, 1)], 0, 4), "max_num_tokens=0"),
    ],
)
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(pagemill.PagemillError, match=message):
        call()
