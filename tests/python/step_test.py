"""Step: leases, fences, and arrays on devices, with computations that run."""

from __future__ import annotations

import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagemill import (
    CapacityError,
    DeviceTable,
    LeaseError,
    PagemillError,
    PagePool,
    Planner,
    RaggedBatch,
    Sequence,
    Step,
)
from pagemill.batch import ARRAYS


def make(
    pages: int = 64, page_size: int = 4, **options: Any
) -> tuple[PagePool, Planner]:
    pool = PagePool(pages, page_size)
    sizes = {"max_num_tokens": 64, "max_num_seqs": 8, "pages_per_seq": 16}
    return pool, Planner(pool, **sizes | options)


def leaves(batch: RaggedBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in ARRAYS}


def copies(batch: RaggedBatch) -> dict[str, Any]:
    return {name: np.array(array) for name, array in leaves(batch).items()}


def assert_same(found: Any, expected: Any) -> None:
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@jax.jit
def slowly(arrays: dict[str, Any], turns: Any) -> dict[str, Any]:
    """The arrays, read only after some milliseconds of matmuls."""
    square = jax.lax.fori_loop(
        0, turns, lambda _, x: jnp.tanh(x @ x), jnp.eye(128)
    )
    zero = (square[0, 0] > 2).astype(jnp.int32)  # which only the loop can tell
    return {
        name: jnp.take(array, jnp.arange(array.shape[0]) + zero, axis=0)
        for name, array in arrays.items()
    }


# ------------------------------------------------------------------- leases


@pytest.mark.parametrize("ring", [1, 2, 3])
def test_results_equal_those_of_copies(ring: int) -> None:
    pool, planner = make(ring=ring)
    with planner.step([]) as step:
        step.retire(slowly(leaves(step.batch), 1))  # compiled
    seqs = [pool.open() for _ in range(5)]
    waiting: list[Any] = []
    refused = 0
    for i in range(24):
        requests = [(s, 1 + (i + j) % 3) for j, s in enumerate(seqs)]
        if i % 5 == 4:
            pool.close(seqs.pop(0))
            seqs.append(pool.open())
            requests = requests[1:]
        while True:
            try:
                step = planner.step(requests)
                break
            except LeaseError:
                refused += 1
                jax.block_until_ready([out for out, _ in waiting])
        out = slowly(leaves(step.batch), 200)
        waiting.append((out, copies(step.batch)))
        step.commit()
        step.retire(out)
    assert refused
    for out, expected in waiting:
        assert_same(out, expected)
    pool.audit()


def test_jax_reads_the_arrays_in_place() -> None:
    """Else the tests here would prove little."""
    pool, planner = make()
    batch = planner.step([(pool.open(), 3)]).batch
    for array in (batch.kv_lens, batch.page_indices, batch.cu_q_lens):
        on_device = jax.device_put(array)
        assert on_device.unsafe_buffer_pointer() == array.ctypes.data


def test_every_buffer_leased() -> None:
    pool, planner = make(ring=2)
    seq = pool.open()
    first, second = planner.step([(seq, 3)]), planner.step([(seq, 2)])
    before = (pool.stats(), seq.length, seq.pages.tolist())
    for end in (lambda: None, first.commit, lambda: second.retire(done=True)):
        end()  # closed but in flight, or retired but open, is leased
        for call in (planner.step, planner.plan):
            with pytest.raises(LeaseError, match="ring=2"):
                call([(seq, 1)])
    assert seq.length == before[1]
    assert seq.pages.tolist() == before[2]
    first.retire(done=True)
    third = planner.step([(seq, 1)])
    assert third.batch.kv_lens[0] == 6
    pool.audit()


def test_arrays_of_a_lease_are_read_only() -> None:
    pool, planner = make()
    step = planner.step([(pool.open(), 3)])
    arrays = [*leaves(step.batch).values(), step.positions, step.logits_indices]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    step.order[:] = 7  # a copy
    assert step.order.tolist() == [0]


def test_a_step_closes_once() -> None:
    pool, planner = make()
    seq = pool.open()
    ends = {"commit": Step.commit, "abort": Step.abort}
    for first in ends.values():
        for second in ends.values():
            step = planner.step([(seq, 2)])
            first(step)
            length = seq.length
            with pytest.raises(PagemillError, match="closed"):
                second(step)
            assert seq.length == length
            step.retire(done=True)
            with pytest.raises(LeaseError, match="already"):
                step.retire(done=True)
    pool.audit()


def test_an_old_step_is_not_the_one_in_its_buffer_now() -> None:
    pool, planner = make(ring=1)
    seq = pool.open()
    old = planner.step([(seq, 2)])
    old.commit()
    old.retire(done=True)
    new = planner.step([(seq, 2)])
    assert new.buffer == old.buffer
    for call in (old.commit, old.abort):
        with pytest.raises(PagemillError, match="closed"):
            call()
    with pytest.raises(LeaseError, match="already"):
        old.retire(done=True)
    assert (seq.length, seq.committed_length) == (4, 2)
    new.abort()
    assert seq.length == 2


@pytest.mark.parametrize(
    "accepted", [[3, 1], [-1], [1, 1], [[1]], 1, [0.5], [True], [2**32]]
)
def test_bad_accepted_counts(accepted: Any) -> None:
    pool, planner = make()
    seq = pool.open()
    step = planner.step([(seq, 2)])
    with pytest.raises(PagemillError, match="accepted"):
        step.commit(accepted)
    assert (seq.length, seq.committed_length) == (2, 0)
    step.commit([1])
    assert (seq.length, seq.committed_length) == (1, 1)


# ------------------------------------------------------------------- fences


def test_a_fence_holds_buffer_and_pages() -> None:
    pool, planner = make(ring=1, pages=2)
    slowly({"x": np.zeros(1, np.int32)}, 1)
    seq = pool.open()
    step = planner.step([(seq, 8)])
    out = slowly({"x": np.zeros(1, np.int32)}, 3000)
    step.commit()
    step.retire(out)
    pool.close(seq)
    if not out["x"].is_ready():  # or this machine is very fast
        assert pool.stats().fenced == 2
        with pytest.raises(LeaseError):
            planner.step([])
    jax.block_until_ready(out)
    planner.poll()
    assert pool.stats().fenced == 0
    assert pool.num_free_pages == 2
    planner.step([(pool.open(), 8)])


@pytest.mark.parametrize(
    ("fence", "match"),
    [
        ((), "no jax array"),
        ({"a": 1.0, "b": None}, "no jax array"),
        (np.ones(3), "no jax array"),
        (None, "done=True"),
    ],
)
def test_what_is_no_fence(fence: Any, match: str) -> None:
    pool, planner = make()
    step = planner.step([(pool.open(), 1)])
    with pytest.raises(LeaseError, match=match):
        step.retire(fence)
    with pytest.raises(LeaseError, match="done=True"):
        step.retire(jnp.ones(3), done=True)
    assert pool.stats().steps_in_flight == 1
    step.retire(done=True)
    assert pool.stats().steps_in_flight == 0


def test_a_traced_fence_is_refused() -> None:
    pool, planner = make()
    step = planner.step([(pool.open(), 1)])

    @jax.jit
    def inside(x: Any) -> Any:
        step.retire([x, jnp.ones(2)])
        return x

    with pytest.raises(LeaseError, match="traced"):
        inside(jnp.ones(3))
    step.retire(done=True)


def test_a_donated_fence_is_said_once_and_can_be_replaced() -> None:
    pool, planner = make(ring=2)
    seq = pool.open()
    step = planner.step([(seq, 1)])
    out = jnp.arange(4) + 1
    step.commit()
    step.retire(out)
    out.delete()  # as donation does
    with pytest.raises(LeaseError, match="donated"):
        planner.step([(seq, 1)])
    assert seq.length == 1
    other = planner.step([(seq, 1)])  # the other buffer
    with pytest.raises(LeaseError, match="ring=2"):
        planner.step([(seq, 1)])
    step.retire(done=True)
    planner.step([(seq, 1)])
    other.commit()
    pool.audit()


def test_donation_of_a_part_leaves_a_fence() -> None:
    pool, planner = make(ring=1)
    step = planner.step([(pool.open(), 1)])
    out, pages = jnp.arange(4) + 1, jnp.arange(9) * 2
    step.commit()
    step.retire({"out": out, "pages": pages})
    jax.jit(lambda x: x + 1, donate_argnums=0)(pages)
    assert pages.is_deleted()
    jax.block_until_ready(out)
    planner.step([])


def test_an_input_is_ready_at_once() -> None:
    """Why the documentation says that an input is no fence."""
    pool, planner = make(ring=1)
    slowly({"x": np.zeros(1, np.int32)}, 1)
    step = planner.step([(pool.open(), 1)])
    given = jax.device_put(step.batch.kv_lens)
    out = slowly({"x": given}, 100)
    jax.block_until_ready(given)
    step.commit()
    step.retire(given)
    planner.poll()
    assert pool.stats().steps_in_flight == 0
    jax.block_until_ready(out)


# ---------------------------------------------------------- context manager


def test_context_manager_commits() -> None:
    pool, planner = make()
    seq = pool.open()
    with planner.step([(seq, 3)]) as step:
        step.retire(jnp.ones(2))
        assert seq.committed_length == 0
    assert seq.committed_length == 3


def raise_after_commit(step: Step) -> None:
    step.commit()
    raise KeyError


def test_context_manager_leaves_a_closed_step_closed() -> None:
    pool, planner = make()
    seq = pool.open()
    with planner.step([(seq, 3)]) as step:
        step.retire(done=True)
        step.commit([1])
    assert seq.committed_length == 1
    step = planner.step([(seq, 3)])
    with pytest.raises(KeyError), step:
        raise_after_commit(step)
    assert seq.committed_length == 4
    assert pool.stats().steps_in_flight == 0


def test_context_manager_aborts() -> None:
    pool, planner = make()
    seq = pool.open()
    before = pool.stats()
    with pytest.raises(KeyError), planner.step([(seq, 3)]):
        raise KeyError
    assert seq.length == 0
    assert pool.stats() == before


def test_context_manager_wants_a_fence() -> None:
    pool, planner = make()
    seq = pool.open()
    with (
        pytest.raises(LeaseError, match="not retired"),
        planner.step([(seq, 3)]) as step,
    ):
        pass
    assert seq.committed_length == 3
    step.retire(done=True)
    assert pool.stats().steps_in_flight == 0


# ------------------------------------------------------------------ devices


class Stream:
    """Random steps of one planner, some of which fail or are taken back."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)
        self.pool, self.planner = make(pages=40, **options)
        self.live: list[Sequence] = []
        self.requests: list[tuple[Sequence, int]] = []

    def next(self) -> Step:
        while True:
            self.disturb()
            try:
                return self.planner.step(self.requests)
            except LeaseError:  # to_device's fences
                time.sleep(0.001)
            except (CapacityError, PagemillError):
                for seq in self.live:
                    self.pool.preempt(seq)

    def disturb(self) -> None:
        draw = self.random
        if self.requests and draw.random() < 0.6:  # decode once more
            self.requests = [(seq, 1) for seq, _ in self.requests]
            return
        while len(self.live) < 6:
            self.live.append(self.pool.open())
        seq = draw.choice(self.live)
        kind = draw.randrange(4)
        if kind == 0:
            self.pool.close(seq)
            self.live.remove(seq)
        elif kind == 1:
            self.pool.truncate(seq, draw.randint(0, seq.length))
        elif kind == 2 and self.pool.num_free_pages > 0:
            self.live.append(self.pool.fork(seq))
        self.pool.take_page_copies()
        chosen = draw.sample(self.live, draw.randint(0, len(self.live)))
        self.requests = [(s, draw.choice([1, 1, 1, 3, 6])) for s in chosen][:8]

    def end(self, step: Step) -> None:
        try:
            if self.random.random() < 0.2:
                step.abort()
                return
        except PagemillError:
            pass  # forked since
        step.commit()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("with_table", [False, True])
def test_device_batches_equal_the_host(seed: int, with_table: bool) -> None:
    stream = Stream(
        seed,
        ring=1 + seed % 3,
        keep_rows=seed % 2 == 0,
        seq_buckets=[2, 8] if seed > 1 else None,
        token_buckets=[16, 64],
        track_delta=with_table,
    )
    table = DeviceTable(8, 16) if with_table else None
    kept = []
    for _ in range(60):
        step = stream.next()
        expected = copies(step.batch)
        found = step.to_device(table=table)
        assert jax.tree.structure(found) == jax.tree.structure(step.batch)
        kept.append((found, expected))
        stream.end(step)
    # Only now: batches stay as they are while later steps are planned.
    for found, expected in kept:
        rows = int(expected["num_seqs"][0])
        pages = -(-expected["kv_lens"][:rows] // 4)
        live = np.arange(16) < pages[:, None]
        dead = expected.pop("page_indices")[:rows]
        np.testing.assert_array_equal(
            np.asarray(found.page_indices)[:rows][live], dead[live]
        )
        assert_same(leaves(found), expected)
    stream.pool.audit()


def test_a_failed_step_keeps_the_delta_of_the_last() -> None:
    pool, planner = make(pages=2, track_delta=True)
    step = planner.step([(pool.open(), 8)])
    expected = [array.tolist() for array in step.table_delta]
    assert expected == [[0, 1], [0, 1]]
    with pytest.raises(CapacityError):
        planner.step([(pool.open(), 1)])
    assert [array.tolist() for array in step.table_delta] == expected


def test_only_the_last_step_tells_its_delta() -> None:
    pool, planner = make(track_delta=True)
    first, second = (planner.step([(pool.open(), 8)]) for _ in range(2))
    with pytest.raises(LeaseError, match="planned since"):
        _ = first.table_delta
    assert len(second.table_delta[0]) == 2
    _, untracked = make()
    with pytest.raises(LeaseError, match="track_delta"):
        _ = untracked.step([]).table_delta


def test_to_device_retires_the_step() -> None:
    pool, planner = make(ring=1)
    step = planner.step([(pool.open(), 5)])
    batch = step.to_device()
    with pytest.raises(LeaseError, match="already"):
        step.retire(done=True)
    step.commit()
    jax.block_until_ready(batch)
    planner.step([])
    assert int(batch.kv_lens[0]) == 5


# ------------------------------------------------------------------ buckets


def test_no_more_programs_than_buckets() -> None:
    tokens, seqs = [16, 64, 100], [2, 8]
    pool, planner = make(
        pages=400,
        pages_per_seq=32,
        max_num_tokens=100,
        token_buckets=tokens,
        seq_buckets=seqs,
    )
    draw = random.Random(0)
    seen = set()

    @jax.jit
    def run(batch: RaggedBatch) -> Any:
        return batch.kv_lens.sum() + batch.slot_mapping.max()

    for i in range(120):
        rows = draw.randint(0, 8) if i else 8
        live = [pool.open() for _ in range(rows)]
        room = draw.choice([9, 64, 100]) if i else 100
        requests = [(s, draw.randint(1, max(1, room // rows))) for s in live]
        if requests and not i:  # the largest bucket, filled
            requests[0] = (live[0], 100 - sum(n for _, n in requests[1:]))
        with planner.step(requests) as step:
            batch = step.batch
            total = sum(n for _, n in requests)
            fits = [t for t in tokens if t >= total]
            assert step.capacities[1] == batch.max_num_tokens == fits[0]
            fits = [s for s in seqs if s >= rows]
            assert step.capacities[0] == batch.max_num_seqs == fits[0]
            assert int(batch.cu_q_lens[-1]) == total
            assert (batch.slot_mapping[total:] == -1).all()
            seen.add(step.capacities)
            out = run(batch)
            step.retire(out)
        out.block_until_ready()
        for seq in live:
            pool.close(seq)
    assert run._cache_size() == len(seen) <= len(tokens) * len(seqs)
    assert (8, 100) in seen


@pytest.mark.parametrize(
    "buckets", [[], [0, 64], [64, 32, 64], [32], [64, 128], [16, 16, 64], 64]
)
def test_bad_buckets(buckets: Any) -> None:
    if buckets == []:
        assert make(token_buckets=buckets)[1].max_num_tokens == 64
        return
    with pytest.raises(PagemillError, match="token_buckets"):
        make(token_buckets=buckets)


def test_a_step_commits_the_plan_before_it() -> None:
    pool = PagePool(64, 16)
    planner = Planner(
        pool, max_num_tokens=64, max_num_seqs=4, pages_per_seq=8, ring=1
    )
    seq = pool.open()
    planner.plan([(seq, 5)])
    step = planner.step([(seq, 1)])
    assert seq.committed_length == 5
    step.abort()
    step.retire(done=True)
    assert seq.length == 5
