"""Data-parallel ranks: planned together, each seeing its own section only."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pagemill
import pytest
from pagemill import PagemillError, ShardedBatch, ShardedPlanner
from pagemill.batch import ARRAYS

RANKS = 4
PAGES, PAGE = 12, 4
P = jax.sharding.PartitionSpec


def make_planner(pages: int = PAGES, **options: Any) -> pagemill.Planner:
    sizes = {"token_buckets": (4, 16), "seq_buckets": (2, 4), "ring": 1}
    return pagemill.Planner(
        pagemill.PagePool(pages, PAGE), 16, 4, 10, **{**sizes, **options}
    )


def make() -> tuple[ShardedPlanner, list[list[pagemill.Sequence]]]:
    planner = ShardedPlanner(make_planner() for _ in range(RANKS))
    return planner, [
        [p.pool.open() for _ in range(4)] for p in planner.planners
    ]


def assert_same(a: pagemill.RaggedBatch, b: pagemill.RaggedBatch) -> None:
    for field in dataclasses.fields(a):
        np.testing.assert_array_equal(
            getattr(a, field.name), getattr(b, field.name), field.name
        )


# Tokens that each rank's sequences bring: the third rank needs the largest
# bucket of sequences, the first of tokens.
COUNTS = [[5, 1], [], [1, 1, 1], [2]]


def test_sections_are_the_ranks_alone_in_one_bucket() -> None:
    planner, seqs = make()
    for counts in (COUNTS, [[1], [3], [1], []]):
        sharded = planner.plan(
            [
                list(zip(s, c, strict=False))
                for s, c in zip(seqs, counts, strict=True)
            ]
        )
        seats = 4 if counts is COUNTS else 2
        tokens = 16 if counts is COUNTS else 4
        assert sharded.num_ranks == RANKS
        assert sharded.kv_lens.shape == (RANKS * seats,)
        assert sharded.page_indices.shape == (RANKS * seats, 10)
        assert sharded.cu_q_lens.shape == (RANKS * (seats + 1),)
        assert sharded.num_seqs.tolist() == [len(c) for c in counts]
        assert sharded.distribution.shape == (RANKS * 3,)
        assert sharded.slot_mapping.shape == (RANKS * tokens,)
        assert planner.positions.shape == (RANKS * tokens,)
        assert planner.logits_indices.shape == (RANKS * seats,)
        for rank in range(RANKS):
            section = sharded.section(rank)
            assert section.max_num_tokens == tokens
            pagemill.validate(section)
            lens = [seqs[rank][i].length for i in planner.order[rank]]
            live = len(counts[rank])
            assert section.kv_lens[:live].tolist() == lens


def test_sections_equal_a_planner_of_that_bucket() -> None:
    planner, seqs = make()
    sharded = planner.plan(
        [
            list(zip(s, c, strict=False))
            for s, c in zip(seqs, COUNTS, strict=True)
        ]
    )
    for rank, counts in enumerate(COUNTS):
        alone = make_planner(token_buckets=None, seq_buckets=None)
        opened = [alone.pool.open() for _ in counts]
        batch = alone.plan(list(zip(opened, counts, strict=True)))
        assert_same(sharded.section(rank), batch)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_each_device_sees_its_own_section(implementation: Any) -> None:
    devices = np.array(jax.devices("cpu")[:RANKS])
    assert devices.size == RANKS
    mesh = jax.sharding.Mesh(devices, ("data",))
    planner, seqs = make()
    rng = np.random.default_rng(0)
    kv_pages = rng.normal(size=(RANKS * PAGES, PAGE, 4, 8)).astype("f4")

    def attend(q: Any, k: Any, v: Any, pages: Any, sharded: Any) -> Any:
        batch = sharded.local()
        out = pagemill.ragged_paged_attention(
            q, pages, batch, k=k, v=v, implementation=implementation
        )
        return *out, [getattr(batch, name) for name in ARRAYS]

    run = jax.jit(
        jax.shard_map(
            attend, mesh=mesh, in_specs=P("data"), out_specs=P("data")
        )
    )
    alone = kv_pages.reshape(RANKS, PAGES, PAGE, 4, 8)
    for counts in (COUNTS, [[1, 1], [3], [1, 2, 4, 1], [1]]):
        sharded = planner.plan(
            [
                list(zip(s, c, strict=False))
                for s, c in zip(seqs, counts, strict=True)
            ]
        )
        rows = RANKS * sharded.max_num_tokens
        q = rng.normal(size=(rows, 4, 8)).astype("f4")
        k, v = rng.normal(size=(2, rows, 2, 8)).astype("f4")
        out, kv_pages, seen = run(q, k, v, kv_pages, sharded)
        for name, array in zip(ARRAYS, seen, strict=True):
            np.testing.assert_array_equal(array, getattr(sharded, name), name)
        kept = []
        for rank in range(RANKS):
            part = slice(
                rank * sharded.max_num_tokens,
                (rank + 1) * sharded.max_num_tokens,
            )
            wanted, pages = pagemill.ragged_paged_attention(
                q[part],
                jnp.asarray(alone[rank]),
                sharded.section(rank),
                k=k[part],
                v=v[part],
                implementation=implementation,
            )
            kept.append(np.asarray(pages))
            np.testing.assert_allclose(out[part], wanted, rtol=1e-6, atol=1e-6)
        alone = np.stack(kept)
        np.testing.assert_array_equal(kv_pages, alone.reshape(kv_pages.shape))


def test_capacity_error_names_the_rank_and_changes_nothing() -> None:
    planner, seqs = make()
    pools = [p.pool for p in planner.planners]
    # Rank 0 has to evict a cached page for what it is asked.
    cached = pools[0].open(list(range(40)))
    planner.plan([[(cached, 16)], [], [], []])
    planner.plan([[(cached, 16)], [], [(seqs[2][0], 16)], []])
    planner.plan([[(cached, 8)], [], [(seqs[2][1], 16)], []])
    planner.plan([[], [], [(seqs[2][2], 13)], []])
    planner.commit()
    pools[0].close(cached)
    before = [pool.stats() for pool in pools]
    assert before[0].evictable == 10 and before[0].free == 2
    with pytest.raises(pagemill.CapacityError, match=r"^rank 2: ") as caught:
        planner.plan([[(seqs[0][0], 16)], [], [(seqs[2][3], 1)], []])
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.rank, error.need, error.free) == (2, 1, 0)
    assert [pool.stats() for pool in pools] == before
    assert seqs[0][0].length == 0
    planner.plan([[(seqs[0][0], 16)], [], [], []])
    assert pools[0].stats().evictions == 2


def test_wrong_requests_name_the_rank_and_change_nothing() -> None:
    planner, seqs = make()
    foreign = seqs[0][0]
    with pytest.raises(PagemillError, match=r"^rank 1: "):
        planner.plan([[(seqs[0][0], 1)], [(foreign, 1)], [], []])
    with pytest.raises(PagemillError, match=r"^rank 3: .*max_num_tokens=16"):
        planner.plan([[(seqs[0][0], 1)], [], [], [(seqs[3][0], 17)]])
    lease = planner.planners[2].step([(seqs[2][0], 1)])
    with pytest.raises(pagemill.LeaseError, match=r"^rank 2: "):
        planner.plan([[(seqs[0][0], 1)], [], [], []])
    lease.abort()
    lease.retire(done=True)
    assert seqs[0][0].length == 0
    with pytest.raises(PagemillError, match="requests_per_rank has 1 entries"):
        planner.plan([[]])
    with pytest.raises(PagemillError, match="requests_per_rank has no entries"):
        planner.plan(None)


def test_a_late_failure_takes_all_back(monkeypatch: Any) -> None:
    planner, seqs = make()
    real = planner.planners[2]._core

    class Racing:
        def step(self, *arrays: Any) -> int:
            raise pagemill.CapacityError("another thread was quicker", need=1)

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(planner.planners[2], "_core", Racing())
    with pytest.raises(pagemill.CapacityError, match="rank 2: another"):
        planner.plan([[(s[0], 5)] for s in seqs])
    assert [s[0].length for s in seqs] == [0] * RANKS
    monkeypatch.undo()
    planner.plan([[(s[0], 5)] for s in seqs])


def test_commit_and_abort() -> None:
    planner, seqs = make()
    planner.plan([[(s[0], 5)] for s in seqs])
    with pytest.raises(
        PagemillError, match=r"accepted_per_rank\[1\]\[0\]=6 must be in range"
    ):
        planner.commit([[5], [6], None, None])
    with pytest.raises(
        PagemillError, match=r"accepted_per_rank\[0\] has shape"
    ):
        planner.commit([[5, 5], None, None, None])
    planner.commit([[5], [2], None, [0]])
    assert [s[0].length for s in seqs] == [5, 2, 5, 0]
    with pytest.raises(PagemillError, match="no planned step"):
        planner.commit()
    planner.plan([[(s[0], 5)] for s in seqs])
    planner.abort()
    assert [s[0].length for s in seqs] == [5, 2, 5, 0]
    with pytest.raises(PagemillError, match="no planned step"):
        planner.abort()


def test_handles_and_counts() -> None:
    planner, seqs = make()
    sharded = planner.plan(
        [np.array([s[0].handle]) for s in seqs],
        [np.array([n], np.int32) for n in (1, 2, 3, 4)],
    )
    assert sharded.section(3).kv_lens.tolist() == [4, 0]


def test_kv_groups() -> None:
    planner = ShardedPlanner(
        pagemill.Planner(
            pagemill.PagePool(PAGES, PAGE, sliding_windows=[None, 4]), 16, 4, 6
        )
        for _ in range(2)
    )
    full, windowed = planner.plan(
        [[(p.pool.open(), 5)] for p in planner.planners]
    )
    for rank in range(2):
        pagemill.validate(full.section(rank))
        pagemill.validate(windowed.section(rank))


def test_local_is_for_one_rank() -> None:
    planner, _ = make()
    sharded = planner.plan([[]] * RANKS)
    with pytest.raises(PagemillError, match="sections of 4 ranks"):
        sharded.local()
    with pytest.raises(PagemillError, match="rank=4 must be in range"):
        sharded.section(4)
    one = ShardedBatch.concatenate([sharded.section(1)])
    assert_same(one.local(), sharded.section(1))


def test_refuses_planners_that_differ() -> None:
    for other, message in (
        (make_planner(pages=9), "total_num_pages=9 of rank 1"),
        (make_planner(token_buckets=(8, 16)), "token_buckets="),
        ("planner", "is a str, not a Planner"),
    ):
        with pytest.raises(PagemillError, match=message):
            ShardedPlanner([make_planner(), other])
    pool = pagemill.PagePool(8, 4)
    with pytest.raises(PagemillError, match="shares its pool"):
        ShardedPlanner([pagemill.Planner(pool, 4, 2, 2) for _ in range(2)])
    with pytest.raises(PagemillError, match="planners is empty"):
        ShardedPlanner([])


def test_refuses_sections_that_differ() -> None:
    planner, seqs = make()
    small = planner.plan([[(s[0], 1)] for s in seqs]).section(0)
    large = planner.plan([[(s[0], 9)] for s in seqs]).section(0)
    with pytest.raises(PagemillError, match=r"slot_mapping\.shape"):
        ShardedBatch.concatenate([small, large])
    with pytest.raises(PagemillError, match="sections is empty"):
        ShardedBatch.concatenate([])
    with pytest.raises(PagemillError, match="not a RaggedBatch"):
        ShardedBatch.concatenate([small, None])
