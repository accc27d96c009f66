"""Faults that paged caches are known for, each as a short scenario."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pagemill
import pytest
from pagemill import (
    CapacityError,
    LeaseError,
    PagemillError,
    PagePool,
    Planner,
    RaggedBatch,
    Sequence,
)
from pagemill.testing import oracle

HEADS, KV_HEADS, DIM = 4, 2, 32


def make(
    pages: int = 8,
    page_size: int = 16,
    windows: tuple[int | None, ...] = (None,),
    **options: Any,
) -> tuple[PagePool, Planner]:
    pool = PagePool(pages, page_size, sliding_windows=windows)
    sizes = {"max_num_tokens": 128, "max_num_seqs": 4, "pages_per_seq": 16}
    return pool, Planner(pool, **sizes | options)


def run(planner: Planner, *requests: tuple[Sequence, int]) -> RaggedBatch:
    """A step that is over at once; its batch stays until the next."""
    step = planner.step(requests)
    step.commit()
    step.retire(done=True)
    return step.batch


class Model:
    """One attention layer over a cache; what nobody holds is NaN."""

    def __init__(self, pool: PagePool, planner: Planner) -> None:
        self.pool, self.planner = pool, planner
        (self.window,) = pool.sliding_windows
        shape = (pool.total_num_pages, pool.page_size, 2 * KV_HEADS, DIM)
        self.kv_pages: Any = np.full(shape, np.nan, np.float32)
        self.tokens: dict[int, list[int]] = {}

    def open(self, tokens: list[int]) -> Sequence:
        seq = self.pool.open(tokens)
        self.tokens[seq.handle] = list(tokens)
        return seq

    def qkv(self, seq: Sequence, position: int) -> tuple[Any, Any, Any]:
        """What depends on all tokens up to the position, and no more."""
        prefix = self.tokens[seq.handle][: position + 1]
        rng = np.random.default_rng(prefix)
        q = rng.normal(size=(HEADS, DIM))
        k, v = rng.normal(size=(2, KV_HEADS, DIM))
        return tuple(x.astype(np.float32) for x in (q, k, v))

    def step(self, *requests: tuple[Sequence, int]) -> RaggedBatch:
        """Runs and commits a step; holds each row against the oracle."""
        for seq, count in requests:
            tokens = self.tokens[seq.handle]
            while len(tokens) < seq.length + count:
                tokens.append(len(tokens))
        step = self.planner.step(requests)
        batch = step.batch
        pagemill.validate(batch, sliding_window=self.window)
        rows = [requests[i] for i in step.order]
        q, k, v = self.inputs(batch, rows)
        out, self.kv_pages = pagemill.ragged_paged_attention(
            q,
            self.kv_pages,
            batch,
            k=k,
            v=v,
            sliding_window=self.window,
            implementation="cpu",
        )
        step.retire(out)
        step.commit()
        out = np.asarray(out)
        for row, (seq, count) in enumerate(rows):
            self.check(seq, count, out[batch.cu_q_lens[row] :][:count])
        self.planner.poll()
        self.poison()
        return batch

    def inputs(
        self, batch: RaggedBatch, rows: list[tuple[Sequence, int]]
    ) -> tuple[Any, Any, Any]:
        tokens = batch.max_num_tokens
        q = np.full((tokens, HEADS, DIM), np.nan, np.float32)
        k, v = np.full((2, tokens, KV_HEADS, DIM), np.nan, np.float32)
        for row, (seq, count) in enumerate(rows):
            for i in range(count):
                at = batch.cu_q_lens[row] + i
                q[at], k[at], v[at] = self.qkv(seq, seq.length - count + i)
        return q, k, v

    def check(self, seq: Sequence, count: int, found: Any) -> None:
        each = [self.qkv(seq, i) for i in range(seq.length)]
        q, k, v = (np.stack(x) for x in zip(*each, strict=True))
        expected = oracle.dense_attention(
            q[-count:], k, v, sm_scale=DIM**-0.5, sliding_window=self.window
        )
        np.testing.assert_allclose(found, expected, atol=1e-4)

    def poison(self) -> None:
        pages = np.array(self.kv_pages)
        free = [
            p
            for p in range(self.pool.total_num_pages)
            if self.pool.page_state(p) == "free"
        ]
        pages[free] = np.nan
        self.kv_pages = pages


# ------------------------------------------------------------- numbered cases


def test_c83_giving_pages_back_twice() -> None:
    pool, planner = make(pages=8)
    kept, gone = pool.open(), pool.open()
    run(planner, (kept, 20), (gone, 40))
    pool.close(gone)
    before = pool.stats()
    for call in (pool.close, pool.preempt, pool.fork, pool.begin_swap_out):
        with pytest.raises(PagemillError, match="closed"):
            call(gone)
    assert pool.stats() == before
    later = pool.open()
    run(planner, (later, 6 * 16))
    everyone = [*kept.pages, *later.pages]
    assert sorted(everyone) == list(range(8))
    with pytest.raises(CapacityError):
        planner.step([(pool.open(), 1)])
    pool.audit()


def test_c83_a_page_that_a_prefix_still_holds() -> None:
    pool, planner = make()
    first = pool.open(range(40))
    run(planner, (first, 40))
    second = pool.open(range(40))
    pool.close(first)
    assert [pool.reference_count(p) for p in second.pages] == [1, 1]
    other = pool.open()
    run(planner, (other, 6 * 16))
    assert not set(other.pages) & set(second.pages)
    pool.audit()


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_c85_a_fully_cached_prompt_leaves_a_token(length: int) -> None:
    pool, planner = make()
    model = Model(pool, planner)
    tokens = list(range(7, 7 + length))
    first = model.open(tokens)
    model.step((first, length))
    second = model.open(tokens)
    assert second.num_cached_tokens == (length - 1) // 16 * 16
    left = length - second.num_cached_tokens
    assert left >= 1
    shared = second.pages.tolist()
    batch = model.step((second, left))
    assert batch.kv_lens[0] == length
    written = {s // 16 for s in batch.slot_mapping.tolist() if s >= 0}
    assert not written & set(shared)


def test_c87_one_of_two_copies_of_a_prefix_is_given_back() -> None:
    pool, planner = make(pages=12)
    model = Model(pool, planner)
    first, second = model.open([5] * 40), model.open([5] * 40)
    model.step((first, 40), (second, 40))
    states = [pool.page_state(p) for p in (*first.pages, *second.pages)]
    assert sorted(states) == ["published"] * 2 + ["written"] * 4
    pool.close(second)
    model.poison()
    third = model.open([9])
    for _ in range(20):
        model.step((first, 1), (third, 4))
        held = {*first.pages.tolist(), *third.pages.tolist()}
        assert all(pool.reference_count(p) == 1 for p in held)
    pool.audit()


def test_c89_pages_that_the_window_has_passed() -> None:
    pool, planner = make(pages=9, windows=(32,))
    model = Model(pool, planner)
    seq, other = model.open([1]), model.open([2])
    model.step((seq, 100))
    assert seq.pages[:4].tolist() == [-1] * 4
    assert (seq.pages[4:] >= 0).all()
    model.step((other, 64))  # in pages that were the first one's
    for _ in range(40):
        batch = model.step((seq, 1), (other, 1))
    assert batch.page_indices[0, :6].tolist() == [0] * 6
    pool.audit()


def test_c92_shapes_stay_fixed_over_steps() -> None:
    tokens, seqs = (64, 128, 317), (16, 64)
    pool, planner = make(
        pages=600,
        max_num_tokens=317,
        max_num_seqs=64,
        token_buckets=tokens,
        seq_buckets=seqs,
    )

    @jax.jit
    def program(batch: RaggedBatch) -> Any:
        return batch.kv_lens.sum()

    live: list[Sequence] = []
    for i in range(300):
        wanted = 1 + int(31.5 * (1 + np.sin(i / 20)))
        while len(live) < wanted:
            live.append(pool.open())
        while len(live) > wanted:
            pool.close(live.pop(0))
        room = 317 - wanted
        requests = []
        for seq in live:
            extra = min(room, 40) if seq.length == 0 else 0
            room -= extra
            requests.append((seq, 1 + extra))
        step = planner.step(requests)
        out = program(step.batch)
        step.retire(out)
        step.commit()
        out.block_until_ready()
        for seq in live:
            if seq.length > 150:
                pool.truncate(seq, 0)
    assert program._cache_size() <= len(tokens) * len(seqs)
    batch = run(planner, (pool.open(), 200), (pool.open(), 117))
    assert batch.max_num_tokens == 317


# -------------------------------------------------- A: rewritten while in use


def test_a_the_next_step_leaves_a_running_ones_arrays_alone() -> None:
    pool, planner = make(ring=2, pages=32)
    seqs = [pool.open() for _ in range(4)]
    first = planner.step([(s, 20) for s in seqs])
    first.commit()
    kept = [np.array(x) for x in jax.tree.leaves(first.batch)]
    for seq in seqs[:2]:
        pool.close(seq)
    for _ in range(5):
        second = planner.step([(s, 1) for s in seqs[2:]])
        second.commit()
        second.retire(done=True)
        assert second.buffer != first.buffer
    for was, now in zip(kept, jax.tree.leaves(first.batch), strict=True):
        np.testing.assert_array_equal(was, now)


# ------------------------------------------------------- B: freed while in use


def test_b_pages_of_a_step_in_flight_are_not_handed_out() -> None:
    pool, planner = make(pages=4)
    gone, seq = pool.open(), pool.open()
    step = planner.step([(gone, 32)])
    step.commit()
    pool.close(gone)
    assert pool.stats().fenced == 2
    with pytest.raises(CapacityError, match="in flight") as info:
        planner.step([(seq, 48)])
    assert (info.value.free, info.value.fenced) == (2, 2)
    running = planner.step([(seq, 32)])
    assert not {*running.batch.page_indices[0, :2]} & {0, 1}
    step.retire(done=True)
    assert pool.stats().fenced == 0


def test_b_window_pages_wait_for_the_committed_length() -> None:
    pool, planner = make(windows=(4,), page_size=4)
    seq = pool.open()
    run(planner, (seq, 4))
    step = planner.step([(seq, 8)])  # speculative: would pass the first page
    assert (seq.pages >= 0).all()
    step.commit([1])
    assert (seq.pages >= 0).all()  # position 5 still sees position 2
    step.retire(done=True)
    run(planner, (seq, 3))
    assert seq.pages.tolist()[0] == -1


def test_b_a_found_page_is_held_at_once() -> None:
    pool, planner = make(pages=2)
    first = pool.open(range(17))
    run(planner, (first, 17))
    pool.close(first)
    found = pool.open(range(17))
    page = int(found.pages[0])
    thief = pool.open()
    with pytest.raises(CapacityError):
        planner.step([(thief, 32)])
    run(planner, (thief, 16))
    assert page not in thief.pages
    assert found.length == 16


# ---------------------------------------------------- C: seen before written


def test_c_nobody_finds_a_page_before_its_step_commits() -> None:
    pool, planner = make()
    first = pool.open(range(33))
    step = planner.step([(first, 33)])
    assert pool.probe(range(33)) == 0
    second = pool.open(range(33))
    assert second.num_cached_tokens == 0
    step.commit()
    assert pool.probe(range(33)) == 32


def test_c_a_cancelled_producer_leaves_nothing() -> None:
    pool, planner = make()
    first, second = pool.open(range(33)), pool.open(range(33))
    steps = [planner.step([(s, 33)]) for s in (first, second)]
    steps[0].abort()
    assert pool.probe(range(33)) == 0
    steps[1].commit()
    assert pool.probe(range(33)) == 32
    assert pool.open(range(33)).pages.tolist() == second.pages[:2].tolist()


def test_c_rejected_tokens_are_never_found() -> None:
    pool, planner = make(page_size=4)
    seq = pool.open(range(4))
    run(planner, (seq, 4))
    step = planner.step([(seq, 5)])
    pool.extend(seq, [7, 7, 7, 7, 7])
    step.commit([2])
    assert pool.probe([0, 1, 2, 3, 7, 7, 7, 7, 0]) == 4
    run(planner, (seq, 2))
    pool.extend(seq, [8, 8])
    assert pool.probe([0, 1, 2, 3, 7, 7, 7, 7, 0]) == 4
    assert pool.probe([0, 1, 2, 3, 7, 7, 8, 8, 0]) == 8


def test_c_tokens_told_of_a_swapped_out_sequence() -> None:
    pool, planner = make(pages=2, page_size=4)
    seq = pool.open()
    run(planner, (seq, 4))
    pool.begin_swap_out(seq)
    pool.end_swap_out(seq)
    other = pool.open()
    run(planner, (other, 4))  # in the page that was the first one's
    pool.extend(seq, [1, 2, 3, 4])
    assert pool.probe([1, 2, 3, 4, 5]) == 0


# --------------------------------------------- D: double frees, ghost entries


def test_d_every_way_to_let_go_counts_once() -> None:
    pool, planner = make(pages=8, page_size=4)
    seq = pool.open(range(10))
    run(planner, (seq, 10))
    forks = [pool.fork(seq) for _ in range(3)]
    pool.truncate(forks[0], 5)
    pool.preempt(forks[1])
    pool.close(forks[1])
    pool.close(seq)
    pool.close(forks[2])
    pool.close(forks[0])  # with an untaken copy
    stats = pool.stats()
    assert stats.free + stats.evictable == 8
    assert pool.clear_cache() == stats.evictable
    assert pool.num_free_pages == 8
    assert pool.take_page_copies().shape == (0, 2)
    both = [pool.open(), pool.open()]
    run(planner, *((s, 16) for s in both))
    assert sorted([*both[0].pages, *both[1].pages]) == list(range(8))
    pool.audit()


def test_d_a_page_held_again_is_not_evicted() -> None:
    pool, planner = make(pages=3, page_size=4)
    first = pool.open(range(9))
    run(planner, (first, 8))
    pool.close(first)
    assert pool.stats().evictable == 2
    again = pool.open(range(5))  # holds the first of the two
    assert pool.stats().evictable == 1
    other = pool.open()
    run(planner, (other, 8))
    assert not set(other.pages) & set(again.pages)
    with pytest.raises(CapacityError):
        planner.step([(other, 1)])


# --------------------------------------------------------- E: counters drift


def test_e_shared_pages_count_once() -> None:
    pool, planner = make()
    first = pool.open(range(33))
    run(planner, (first, 33))
    others = [pool.open(range(33)) for _ in range(3)]
    assert pool.stats().published == 2
    pool.close(first)
    for seq in others:
        assert pool.stats().evictable == 0
        pool.close(seq)
    assert (pool.stats().evictable, pool.num_free_pages) == (2, 6)
    assert pool.num_available_pages == 8


@pytest.mark.parametrize("window", [None, 3, 9])
def test_e_rejected_tokens_leak_no_page(window: int | None) -> None:
    pool, planner = make(pages=12, page_size=4, windows=(window,))
    seq = pool.open()
    run(planner, (seq, 5))
    for i in range(40):
        step = planner.step([(seq, 6)])
        step.commit([i % 4])
        step.retire(done=True)
        if seq.length > 30:
            pool.preempt(seq)
    pool.close(seq)
    assert pool.num_free_pages == 12
    pool.audit()


def test_e_a_skipped_forward_takes_no_room() -> None:
    pool, planner = make()
    seq = pool.open()
    run(planner, (seq, 16))
    before = (pool.stats(), seq.pages.tolist())
    step = planner.step([(seq, 40)])
    step.abort()
    step.retire(done=True)
    assert (pool.stats(), seq.pages.tolist()) == before
    run(planner, (seq, 1))
    assert seq.committed_length == 17


def test_e_steps_committed_out_of_order() -> None:
    pool, planner = make()
    seq, other = pool.open(), pool.open()
    first = planner.step([(seq, 4)])
    between, second = planner.step([(other, 1)]), planner.step([(seq, 4)])
    second.commit()
    between.commit()
    assert seq.committed_length == 0
    with pytest.raises(PagemillError, match="committed"):
        pool.begin_swap_out(seq)
    first.commit()
    assert seq.committed_length == 8


# ------------------------------------------------------ F: stale tails, rows


@pytest.mark.parametrize("keep_rows", [False, True])
def test_f_rows_hold_their_sequence_and_nothing_else(keep_rows: bool) -> None:
    pool, planner = make(pages=64, ring=2, keep_rows=keep_rows)
    seqs = [pool.open() for _ in range(4)]
    run(planner, *((s, n) for s, n in zip(seqs, (48, 16, 17, 40), strict=True)))
    changes: list[Any] = [
        lambda: None,
        lambda: pool.close(seqs.pop(0)),
        lambda: pool.truncate(seqs[1], 3),
        lambda: pool.preempt(seqs[0]),
        lambda: seqs.append(pool.fork(seqs[1])),
        seqs.reverse,
        lambda: pool.close(seqs.pop()),
    ]
    for change in changes * 2:
        change()
        pool.take_page_copies()
        while len(seqs) < 2:
            seqs.append(pool.open())
        for count in (1, 18, 1, 1):
            chosen = seqs[:3]
            step = planner.step([(s, count) for s in chosen])
            for row, index in enumerate(step.order):
                pages = chosen[index].pages.tolist()
                expected = pages + [0] * (16 - len(pages))
                assert step.batch.page_indices[row].tolist() == expected
            assert not step.batch.page_indices[len(chosen) :].any()
            assert not step.batch.kv_lens[len(chosen) :].any()
            step.commit()
            step.retire(done=True)
        for seq in seqs:
            if seq.length > 100:
                pool.truncate(seq, 0)


# ------------------------------------------------------ H: padding and order


def test_h_a_mixed_batch_says_so() -> None:
    pool, planner = make(pages=32, prefill_chunk=32)
    seqs = [pool.open() for _ in range(4)]
    run(planner, (seqs[3], 5))
    step = planner.step(
        [(seqs[0], 32), (seqs[1], 7), (seqs[2], 32), (seqs[3], 1)]
    )
    assert step.order.tolist() == [3, 0, 2, 1]
    batch = step.batch
    assert batch.distribution.tolist() == [1, 3, 4]
    assert batch.cu_q_lens.tolist() == [0, 1, 33, 65, 72]
    assert step.logits_indices.tolist() == [0, 32, 64, 71]
    pagemill.validate(batch)


def test_h_padding_agrees_with_the_counts() -> None:
    pool, planner = make(pages=32, max_num_seqs=8, token_buckets=[32, 128])
    run(planner, *((pool.open(), 16) for _ in range(8)))  # leaves its traces
    seq = pool.open()
    step = planner.step([(seq, 17)])
    batch = step.batch
    assert batch.cu_q_lens.tolist() == [0] + [17] * 8
    assert batch.num_seqs.tolist() == [1]
    assert batch.max_num_tokens == 32
    slots = batch.slot_mapping.tolist()
    assert [s % 16 for s in slots[:17]] == [*range(16), 0]
    assert slots[17:] == [-1] * 15
    assert step.positions.tolist() == [*range(17)] + [0] * 15


# --------------------------------------------------------------- I: null page


def test_i_page_0_is_a_page_like_others() -> None:
    pool, planner = make(pages=2)
    model = Model(pool, planner)
    first, second = model.open([1]), model.open([2])
    batch = model.step((first, 3), (second, 2))
    assert sorted([*first.pages, *second.pages]) == [0, 1]
    assert (batch.slot_mapping[5:] == -1).all()
    model.step((first, 1), (second, 1))


# ------------------------------------------------------------ J: prefix keys


def test_j_a_hit_outlives_what_is_evicted_after_it() -> None:
    pool, planner = make(pages=4, page_size=4)
    model = Model(pool, planner)
    first = model.open([*range(13)])
    model.step((first, 13))
    pool.close(first)
    assert pool.probe(range(13)) == 12
    found = model.open([*range(9)])
    assert found.num_cached_tokens == 8
    other = model.open([3])
    model.step((other, 8))  # evicts what nobody holds
    assert pool.probe(range(13)) == 8
    with pytest.raises(CapacityError):
        planner.step([(found, 1)])
    pool.close(other)
    model.step((found, 1))


def test_j_salts_keep_tenants_and_adapters_apart() -> None:
    pool, planner = make()
    prompt = range(33)
    run(planner, (pool.open(prompt, salt="adapter:1"), 33))
    for salt in ("", "adapter:2", "adapter:1 ", b"adapter:"):
        assert pool.probe(prompt, salt=salt) == 0
    assert pool.probe(prompt, salt=b"adapter:1") == 32


def test_j_groups_with_windows_still_hit() -> None:
    pool, planner = make(pages=64, page_size=4, windows=(None, 6))
    first = pool.open(range(50))
    run(planner, (first, 50))
    assert first.pages_of(1)[:11].tolist() == [-1] * 11
    second = pool.open(range(50))
    assert second.num_cached_tokens == 48
    assert (second.pages_of(0) == first.pages_of(0)[:12]).all()
    step = planner.step([(second, 2)])
    assert [b.kv_lens[0] for b in step.batches] == [50, 50]


def test_j_a_partly_filled_page_has_no_key() -> None:
    pool, planner = make(page_size=4)
    seq = pool.open(range(6))
    run(planner, (seq, 6))
    assert pool.probe([*range(6), 0, 0, 0]) == 4
    pool.extend(seq, [9, 9])
    assert pool.probe([*range(6), 9, 9, 0]) == 4
    run(planner, (seq, 2))
    assert pool.probe([*range(6), 9, 9, 0]) == 8
    assert pool.probe([*range(6), 9, 8, 0]) == 4


def test_j_committing_evicts_nothing() -> None:
    pool, planner = make(pages=4, page_size=4)
    seq = pool.open(range(17))
    step = planner.step([(seq, 16)])
    step.commit()
    assert pool.stats().published == 4
    assert pool.stats().evictions == 0
    pool.audit()


# --------------------------------------------------------------- K: liveness


def test_k_what_can_never_be_served_is_told() -> None:
    pool, planner = make(pages=4)
    with pytest.raises(CapacityError, match="never") as info:
        planner.step([(pool.open(), 65)])
    assert info.value.need == 5 > pool.total_num_pages
    with pytest.raises(CapacityError) as later:
        planner.step([(pool.open(), 32), (pool.open(), 48)])
    assert later.value.need == 5


def test_k_preempting_one_lets_the_other_finish() -> None:
    pool, planner = make(pages=6, page_size=4)
    rivals = [pool.open(range(100, 116)), pool.open(range(200, 216))]
    run(planner, *((s, 12) for s in rivals))
    with pytest.raises(CapacityError):
        planner.step([(rivals[0], 4)])
    pool.preempt(rivals[1])
    run(planner, (rivals[0], 4))
    pool.close(rivals[0])
    # What is left of its pages is found again, and work goes on from there.
    found = pool.resume(rivals[1])
    assert found == 8
    run(planner, (rivals[1], 16 - found))
    assert rivals[1].committed_length == 16


def test_k_preempting_what_runs_yields_pages_later() -> None:
    pool, planner = make(pages=4)
    seq, other = pool.open(), pool.open()
    step = planner.step([(seq, 64)])
    step.commit()
    pool.preempt(seq)
    with pytest.raises(CapacityError, match="in flight") as info:
        planner.step([(other, 1)])
    assert (info.value.free, info.value.fenced) == (0, 4)
    step.retire(done=True)
    run(planner, (other, 1))


def test_k_a_full_ring_is_no_lack_of_pages() -> None:
    pool, planner = make(ring=1)
    seq = pool.open()
    planner.step([(seq, 1)])
    with pytest.raises(LeaseError):
        planner.step([(seq, 1)])
