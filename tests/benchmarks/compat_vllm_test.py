"""compat.vllm holds what vLLM's own modules hold, after the same calls."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
from pagemill.compat import vllm as compat
from pagemill.compat.vllm import events as own_events

from benchmarks.peers import stubs, vllm_core

SIZE = vllm_core.BLOCK_SIZE
STEPS = 400


@contextlib.contextmanager
def telling_events() -> Iterator[None]:
    """Lets vLLM's pool make our events: its own are stubs here."""
    with pytest.MonkeyPatch.context() as patch:
        vllm = vllm_core.load()
        for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
            patch.setattr(vllm.block_pool, name, getattr(own_events, name))
        patch.setattr(
            vllm.manager, "BlockStored", own_events.BlockStored, raising=True
        )
        patch.setattr(
            vllm.block_pool,
            "maybe_convert_block_hash",
            lambda digest: int.from_bytes(digest[-8:], "big"),
        )
        yield


def make_config(num_blocks: int, windows: list[int | None]) -> Any:
    interface = vllm_core.load().interface
    shape = {
        "block_size": SIZE,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": stubs.Stub,
    }
    specs = [
        interface.FullAttentionSpec(**shape)
        if window is None
        else interface.SlidingWindowSpec(**shape, sliding_window=window)
        for window in windows
    ]

    class Zeroed(interface.KVCacheConfig):
        needs_kv_cache_zeroing = True

    return Zeroed(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            interface.KVCacheGroupSpec([f"layer{i}"], spec)
            for i, spec in enumerate(specs)
        ],
    )


def make_managers(
    num_blocks: int, windows: list[int | None], **options: Any
) -> tuple[Any, Any]:
    """Theirs and ours."""
    options = {
        "max_model_len": 400,
        "scheduler_block_size": SIZE,
        "hash_block_size": SIZE,
        "enable_kv_cache_events": True,
        **options,
    }
    config = make_config(num_blocks, windows)
    theirs = vllm_core.load().manager.KVCacheManager(config, **options)
    theirs.block_pool.medium = own_events.MEDIUM_GPU  # a stub
    return theirs, compat.KVCacheManager(config, **options)


def free_order(pool: Any) -> list[int]:
    return [b.block_id for b in pool.free_block_queue.get_all_free_blocks()]


def same_pools(theirs: Any, ours: Any) -> None:
    assert ours.get_num_free_blocks() == theirs.get_num_free_blocks()
    assert ours.get_usage() == theirs.get_usage()
    seen = [
        [(b.ref_cnt, b.block_hash, b.block_hash_num_tokens) for b in p.blocks]
        for p in (theirs, ours)
    ]
    # vLLM counts its null block, up and down, to no end.
    assert seen[0][1:] == seen[1][1:]
    ours.core.audit()


def same_end(theirs: Any, ours: Any) -> None:
    """Takes all that is free, and so shows the order."""
    order = free_order(theirs)
    assert [b.block_id for b in theirs.get_new_blocks(len(order))] == order
    assert ours.take(len(order)) == order
    assert ours.take_events() == theirs.take_events()


class PoolStream:
    """Random calls of two pools."""

    def __init__(self, seed: int, *, caching: bool) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.choice([2, 9, 40])
        self.pools = (
            vllm_core.load().block_pool.BlockPool(
                num_blocks,
                caching,
                SIZE,
                enable_kv_cache_events=True,
                medium=own_events.MEDIUM_GPU,
            ),
            compat.BlockPool(
                num_blocks, caching, SIZE, enable_kv_cache_events=True
            ),
        )
        self.caching = caching
        # Block ids, each once for every time that it is held.
        self.held: list[int] = []
        self.requests = [
            vllm_core.make_request(
                str(i), range(i, i + 10 * SIZE), caching=True
            )
            for i in range(6)
        ]

    def blocks(self, ids: list[int]) -> list[list[Any]]:
        return [[pool.blocks[i] for i in ids] for pool in self.pools]

    def step(self) -> None:
        name = self.random.choices(
            ["take", "free", "cache", "hit", "evict", "reset"],
            [6, 6, 5, 5, 1, 1],
        )[0]
        getattr(self, name)()
        same_pools(*self.pools)

    def take(self) -> None:
        count = self.random.randrange(6)
        results = []
        for pool in self.pools:
            try:
                results.append([b.block_id for b in pool.get_new_blocks(count)])
            except ValueError:
                results.append(None)
        assert results[0] == results[1]
        self.held += results[0] or []

    def free(self) -> None:
        self.random.shuffle(self.held)
        count = self.random.randrange(len(self.held) + 1)
        ids, self.held = self.held[:count], self.held[count:]
        ids += [0] * self.random.randrange(2)
        for pool, blocks in zip(self.pools, self.blocks(ids), strict=True):
            pool.free_blocks(iter(blocks))

    def cache(self) -> None:
        if not self.caching:
            return
        ours = self.pools[1]
        ids = [
            i for i in dict.fromkeys(self.held) if not ours.blocks[i].block_hash
        ][: self.random.randrange(1, 5)]
        if self.random.random() < 0.3:
            ids.insert(0, 0)
        start = self.random.randrange(4)
        mask = self.random.choice(
            [None, [self.random.random() < 0.7 for _ in ids]]
        )
        group = self.random.randrange(2)
        request = self.random.choice(self.requests)
        for pool, blocks in zip(self.pools, self.blocks(ids), strict=True):
            padded = [pool.null_block] * start + blocks
            pool.cache_full_blocks(
                request, padded, start, len(padded), SIZE, group, mask
            )

    def hit(self) -> None:
        request = self.random.choice(self.requests)
        digest = self.random.choice(request.block_hashes)
        groups = self.random.choice([[0], [1], [0, 1]])
        found = [pool.get_cached_block(digest, groups) for pool in self.pools]
        ids = [blocks and [b.block_id for b in blocks] for blocks in found]
        assert ids[0] == ids[1]
        if ids[0] and self.random.random() < 0.7:
            for pool, blocks in zip(self.pools, found, strict=True):
                pool.touch(blocks)
            self.held += ids[0]

    def evict(self) -> None:
        count = self.random.randrange(4)
        num_blocks = self.pools[1].num_gpu_blocks
        ids = {self.random.randrange(num_blocks) for _ in range(count)}
        for pool in self.pools:
            pool.evict_blocks(ids)

    def reset(self) -> None:
        if self.random.random() < 0.5:
            for pool, blocks in zip(
                self.pools, self.blocks(self.held), strict=True
            ):
                pool.free_blocks(blocks)
            self.held = []
        results = [pool.reset_prefix_cache() for pool in self.pools]
        assert results == [not self.held] * 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_pools_agree(seed: int, caching: bool) -> None:
    stream = PoolStream(seed, caching=caching)
    with telling_events():
        for _ in range(STEPS):
            stream.step()
        same_end(*stream.pools)


class ManagerStream:
    """Random calls of two managers: what a scheduler does, and more."""

    def __init__(
        self, seed: int, windows: list[int | None], **options: Any
    ) -> None:
        self.random = random.Random(seed)
        num_blocks = self.random.choice([12, 30, 90])
        self.caching = options.get("enable_caching", True)
        self.managers = make_managers(num_blocks, windows, **options)
        self.made = 0
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.counts = dict.fromkeys(("hit", "full", "admitted", "brought"), 0)

    def step(self) -> None:
        name = self.random.choices(
            ["arrive", "admit", "chunk", "decode", "free", "preempt", "odd"],
            [4, 5, 3, 12, 2, 1, 1],
        )[0]
        getattr(self, name)()
        theirs, ours = self.managers
        same_pools(theirs.block_pool, ours.block_pool)
        for request in self.waiting + self.running:
            name = request.request_id
            assert ours.get_block_ids(name) == theirs.get_block_ids(name)
            assert ours.estimate_cached_tokens(
                request
            ) == theirs.estimate_cached_tokens(request)
            computed = request.num_computed_tokens
            assert ours.get_block_ids_for_computed_tokens(
                name, computed
            ) == theirs.get_block_ids_for_computed_tokens(name, computed)
        assert ours.usage == theirs.usage
        assert ours.take_new_block_ids() == theirs.take_new_block_ids()
        assert ours.take_events() == theirs.take_events()

    def arrive(self) -> None:
        shared = self.random.randrange(3)
        common = self.random.randrange(100)
        tail = [
            self.random.randrange(9)
            for _ in range(self.random.choice([5, 20, 80, 200]))
        ]
        tokens = [shared * 1000 + i for i in range(common)] + tail
        self.made += 1
        self.waiting.append(
            vllm_core.make_request(str(self.made), tokens, caching=self.caching)
        )

    def allocate(self, request: Any, new: int, **options: Any) -> bool:
        """Allocates with what is cached, and compares."""
        results = []
        external = options.pop("external", 0)
        for manager in self.managers:
            blocks, cached, brought = None, 0, 0
            if options.get("lookup"):
                blocks, cached, junction = manager.get_computed_blocks(request)
                results.append((blocks.get_block_ids(), cached, junction))
                brought = min(external, request.num_tokens - cached - 1)
            call = {k: v for k, v in options.items() if k != "lookup"}
            count = min(new, request.num_tokens - cached - brought)
            if brought and self.made % 2:  # they are loaded, and no more
                count, call["delay_cache_blocks"] = 0, True
            made = manager.allocate_slots(
                request,
                count,
                cached,
                blocks,
                num_external_computed_tokens=brought,
                skip_zeroing_group_ids=(0,) if self.made % 3 else (),
                **call,
            )
            results.append(made and made.get_block_ids())
        half = len(results) // 2
        assert results[half:] == results[:half]
        if results[-1] is None:
            self.counts["full"] += 1
            return False
        if options.get("lookup"):
            self.counts["hit"] += bool(cached)
            request.num_computed_tokens = cached + brought
            self.counts["brought"] += brought > 0
        request.num_computed_tokens += count
        return True

    def admit(self) -> None:
        if not self.waiting:
            return
        request = self.random.choice(self.waiting)
        new = self.random.choice([1000, self.random.randrange(1, 60)])
        if self.allocate(
            request,
            new,
            lookup=True,
            external=self.random.choice([0, 0, 0, 16, 50, 150]),
            full_sequence_must_fit=self.random.random() < 0.5,
            num_lookahead_tokens=self.random.choice([0, 0, 5]),
            reserved_blocks=self.random.choice([0, 0, 3]),
            has_scheduled_reqs=self.random.random() < 0.5,
        ):
            self.waiting.remove(request)
            self.running.append(request)
            request.status = vllm_core.load().request.RequestStatus.RUNNING
            self.counts["admitted"] += 1

    def chunk(self) -> None:
        """A running request's next part of its prompt."""
        for request in self.running:
            left = request.num_tokens - request.num_computed_tokens
            if left > 0 and not self.allocate(
                request,
                self.random.randrange(1, left + 1),
                delay_cache_blocks=self.random.random() < 0.2,
            ):
                self.give_back(request)
                return

    def decode(self) -> None:
        for request in [*self.running]:
            if request.num_computed_tokens < request.num_tokens:
                continue
            if request.num_tokens >= 390:
                continue
            vllm_core.append([request], self.random.randrange(9))
            request.num_in_flight_tokens = self.random.choice([0, 1])
            if not self.allocate(
                request, 1, num_lookahead_tokens=self.random.choice([0, 4])
            ):
                self.give_back(self.random.choice(self.running))

    def free(self) -> None:
        if self.running:
            request = self.random.choice(self.running)
            self.running.remove(request)
            if self.random.random() < 0.5:
                for manager in self.managers:
                    manager.free(request)
                return
            for manager in self.managers:
                blocks = manager.pop_blocks_for_free(request)
                manager.block_pool.free_blocks(reversed(blocks))

    def preempt(self) -> None:
        if self.running:
            self.give_back(self.random.choice(self.running))

    def give_back(self, request: Any) -> None:
        for manager in self.managers:
            manager.free(request)
        self.running.remove(request)
        self.waiting.append(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = vllm_core.load().request.RequestStatus.PREEMPTED

    def odd(self) -> None:
        """What happens seldom."""
        if self.random.random() < 0.3:
            while self.running:
                self.free()
        results = [manager.reset_prefix_cache() for manager in self.managers]
        assert results[0] == results[1]
        ids = {self.random.randrange(12) for _ in range(3)}
        for manager in self.managers:
            manager.evict_blocks(ids)
        if self.waiting and self.caching:
            request = self.waiting[0]
            found = []
            for manager in self.managers:
                blocks, cached, _ = manager.get_computed_blocks(request)
                cut = manager.truncate_computed_blocks(
                    blocks, cached // SIZE // 2 * SIZE
                )
                found.append(
                    (
                        cut.get_block_ids(),
                        (cut + blocks).get_block_ids(allow_none=True),
                        blocks.get_unhashed_block_ids_all_groups(),
                    )
                )
            assert found[0] == found[1]


CASES = {
    "full": ([None], {}),
    "no cache": ([None], {"enable_caching": False}),
    "watermark": ([None], {"watermark": 0.1}),
    "eagle": ([None], {"use_eagle": True, "num_prefill_lookahead": 3}),
    "window": ([40], {}),
    "window of 1": ([1], {}),
    "window and eagle": ([40], {"use_eagle": True}),
    "window of few": ([40], {"max_in_flight_tokens": 20}),
    "hybrid": ([None, 40], {"max_in_flight_tokens": 60}),
    "hybrid of 4": ([40, None, 40, 100], {}),
    "two of full": ([None, None], {}),
    "two windows": ([17, 70], {}),
    "hybrid, no cache": ([None, 40], {"enable_caching": False}),
    "hybrid, eagle, no cache": (
        [None, 40],
        {"enable_caching": False, "use_eagle": True},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_managers_agree(seed: int, case: str) -> None:
    windows, options = CASES[case]
    stream = ManagerStream(seed, windows, **options)
    with telling_events():
        for _ in range(STEPS):
            stream.step()
        assert stream.counts["admitted"] > 5
        same_end(*(manager.block_pool for manager in stream.managers))
