"""compat.vllm without vLLM: its use, and its errors."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest
from pagemill import PagemillError, UnsupportedError
from pagemill.compat.vllm import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    KVCacheBlocks,
    KVCacheManager,
)

SIZE = 16


@dataclasses.dataclass
class FullAttentionSpec:
    block_size: int = SIZE


@dataclasses.dataclass
class SlidingWindowSpec:
    block_size: int = SIZE
    sliding_window: int = 40

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        del max_in_flight_tokens
        return -(-max_model_len // self.block_size)


@dataclasses.dataclass
class MambaSpec:
    block_size: int = SIZE


@dataclasses.dataclass
class Group:
    kv_cache_spec: Any


@dataclasses.dataclass
class Config:
    num_blocks: int
    kv_cache_groups: list[Group]


class Request:
    """What is read of a request."""

    def __init__(self, name: str, tokens: list[int]) -> None:
        self.request_id = name
        self.all_token_ids = tokens
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.status = "WAITING"
        self.lora_request = None
        self.cache_salt = "salt"

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def block_hashes(self) -> list[bytes]:
        digest = hashlib.sha256()
        hashes = []
        for i in range(self.num_tokens // SIZE):
            tokens = self.all_token_ids[i * SIZE : (i + 1) * SIZE]
            digest.update(repr(tokens).encode())
            hashes.append(digest.digest())
        return hashes


def make(*specs: Any, num_blocks: int = 32, **options: Any) -> KVCacheManager:
    groups = [Group(spec) for spec in specs or (FullAttentionSpec(),)]
    options = {
        "max_model_len": 1000,
        "scheduler_block_size": SIZE,
        "hash_block_size": SIZE,
        **options,
    }
    return KVCacheManager(Config(num_blocks, groups), **options)


def admit(manager: KVCacheManager, request: Request) -> Any:
    blocks, cached, _ = manager.get_computed_blocks(request)
    new = manager.allocate_slots(
        request, request.num_tokens - cached, cached, blocks
    )
    if new is not None:
        request.num_computed_tokens = request.num_tokens
        request.status = "RUNNING"
    return new


def hash_of(i: int) -> bytes:
    return hashlib.sha256(bytes([i])).digest()


def make_pool(num_blocks: int = 8, **options: Any) -> BlockPool:
    return BlockPool(num_blocks, True, SIZE, **options)


def state(pool: BlockPool) -> Any:
    pool.core.audit()
    return [(b.ref_cnt, b.block_hash) for b in pool.blocks], pool.core.num_free


def test_blocks() -> None:
    pool = make_pool()
    one, two = pool.get_new_blocks(2)
    assert [one.block_id, two.block_id] == [1, 2]
    assert one == pool.blocks[1]
    assert one != two
    assert len({one, two, pool.blocks[1]}) == 2
    assert pool.null_block.is_null
    assert pool.is_block_writable(one)
    assert (one.ref_cnt, one.block_hash) == (1, None)
    assert pool.get_usage() == pytest.approx(2 / 7)
    pool.free_blocks([pool.null_block, two, one])
    assert pool.get_num_free_blocks() == 7
    assert [b.block_id for b in pool.get_new_blocks(3)] == [2, 1, 3]
    assert "block_id=1" in repr(one)
    assert [b.block_id for b in pool.blocks[1:3]] == [1, 2]


def test_hashes() -> None:
    pool = make_pool(enable_kv_cache_events=True)
    request = Request("a", list(range(40)))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 2, SIZE, 3)
    first, second = request.block_hashes
    assert pool.get_cached_block(first, [3]) == [blocks[0]]
    assert pool.get_cached_block(first, [3, 0]) is None
    assert blocks[1].block_hash == second + bytes([0, 0, 0, 3])
    assert blocks[1].block_hash_num_tokens == 32
    pool.free_blocks(reversed(blocks))
    assert [b.block_id for b in pool.get_new_blocks(6)] == [3, 4, 5, 6, 7, 2]
    pool.free_blocks(pool.make_blocks(range(2, 8)))
    assert pool.reset_prefix_cache()
    stored, removed, cleared = pool.take_events()
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == list(range(32))
    assert stored.extra_keys == [("salt",), None]
    assert removed == BlockRemoved(
        [int.from_bytes(second[-8:], "big")], "GPU", 3
    )
    assert cleared == AllBlocksCleared()
    assert pool.take_events() == []


def test_double_free() -> None:
    pool = make_pool()
    blocks = pool.get_new_blocks(3)
    pool.touch(blocks[:1])
    pool.free_blocks([blocks[1]])
    before = state(pool)
    for wrong in (
        [blocks[2], blocks[1]],
        [blocks[2], blocks[2]],
        [blocks[0]] * 3,
        [*blocks],
    ):
        with pytest.raises(PagemillError, match=r"block \d has ref_cnt="):
            pool.free_blocks(wrong)
        assert state(pool) == before
    with pytest.raises(PagemillError, match="block 2 cannot be touched"):
        pool.touch([blocks[0], blocks[1]])
    assert state(pool) == before


def test_foreign_block() -> None:
    pool, other = make_pool(), make_pool()
    mine, theirs = pool.get_new_blocks(1), other.get_new_blocks(1)
    before = state(pool)
    for call in (pool.free_blocks, pool.touch):
        with pytest.raises(PagemillError, match="another pool"):
            call([*mine, *theirs])
    manager = make()
    request = Request("a", list(range(40)))
    with pytest.raises(PagemillError, match="another pool"):
        manager.allocate_slots(request, 8, 16, KVCacheBlocks((theirs,)))
    with pytest.raises(PagemillError, match=r"block 8 must be in range \[0, 7"):
        pool.evict_blocks({8})
    assert state(pool) == before


def test_too_many_blocks() -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="num_blocks=8 must be at most the 7"):
        pool.get_new_blocks(8)
    assert pool.get_num_free_blocks() == 7


def test_caching_twice() -> None:
    pool = make_pool()
    request = Request("a", list(range(48)))
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 1, SIZE, 0)
    before = state(pool)
    with pytest.raises(PagemillError, match=r"block 1 .* cached already"):
        pool.cache_full_blocks(request, blocks, 0, 2, SIZE, 0)
    with pytest.raises(PagemillError, match=r"block 2 .* named twice"):
        pool.cache_full_blocks(request, [blocks[1]] * 2, 0, 2, SIZE, 0)
    with pytest.raises(PagemillError, match="must have them for 4"):
        pool.cache_full_blocks(request, blocks * 2, 1, 4, SIZE, 0)
    assert state(pool) == before


@pytest.mark.parametrize("size", [1, 16, 31, 32])
def test_hashes_of_any_size(size: int) -> None:
    pool = make_pool()
    one, two = pool.get_new_blocks(2)
    pool.core.publish([1, 2], [b"\0" * size, b"\1" * size], [16, 32], 0)
    assert pool.get_cached_block(b"\0" * size, [0]) == [one]
    assert pool.get_cached_block(b"\1" * size, [0]) == [two]
    assert two.block_hash == b"\1" * size + bytes(4)
    for wrong in (b"", b"\0" * 33):
        with pytest.raises(PagemillError, match="block_hash of"):
            pool.get_cached_block(wrong, [0])


def test_life_of_a_request() -> None:
    manager = make(log_stats=True)
    one, two = (Request(name, list(range(40))) for name in "ab")
    assert admit(manager, one).get_block_ids() == ([1, 2, 3],)
    blocks, cached, junction = manager.get_computed_blocks(two)
    assert (blocks.get_block_ids(), cached, junction) == (([1, 2],), 32, 0)
    assert [b.ref_cnt for b in blocks.blocks[0]] == [1, 1]
    manager.record_prefix_cache_stats(two, cached)
    assert admit(manager, two).get_block_ids() == ([4],)
    assert manager.get_block_ids("b") == ([1, 2, 4],)
    assert [b.ref_cnt for b in manager.get_blocks("b").blocks[0]] == [2, 2, 1]
    assert manager.estimate_cached_tokens(two) == 32
    assert manager.get_num_common_prefix_blocks("a") == [0]
    assert not manager.reset_prefix_cache()
    two.all_token_ids += [1] * 9
    assert manager.allocate_slots(two, 9).get_block_ids() == ([5],)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 40, 32)
    manager.free(one)
    manager.block_pool.free_blocks(reversed(manager.pop_blocks_for_free(two)))
    manager.free(two)  # not known any more
    assert manager.usage == 0
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(one)[1] == 0
    manager.block_pool.core.audit()


def test_refused_requests_hold_nothing() -> None:
    manager = make(num_blocks=4)
    big = Request("big", list(range(64)))
    assert admit(manager, big) is None
    assert manager.get_block_ids("big") == ([],)
    assert manager.usage == 0
    with pytest.raises(PagemillError, match="num_new_tokens=0"):
        manager.allocate_slots(big, 0)


def test_sliding_window_gives_back() -> None:
    manager = make(FullAttentionSpec(), SlidingWindowSpec())
    request = Request("a", list(range(100)))
    admit(manager, request)
    request.all_token_ids.append(1)
    manager.allocate_slots(request, 1)
    full, window = manager.get_block_ids("a")
    assert len(full) == len(window) == 7
    assert window[:3] == [0, 0, 0]
    assert 0 not in window[3:] + full
    manager.free(request)
    blocks, cached, _ = manager.get_computed_blocks(request)
    assert cached == 96
    assert blocks.get_block_ids()[1][:3] == [0, 0, 0]
    manager.block_pool.core.audit()


def test_computed_blocks_for_a_running_request() -> None:
    manager = make()
    request = Request("a", list(range(40)))
    admit(manager, request)
    blocks = manager.get_computed_blocks(request)[0]
    with pytest.raises(PagemillError, match="request a holds blocks already"):
        manager.allocate_slots(request, 1, 32, blocks)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dcp_world_size": 2}, "dcp_world_size=2"),
        ({"pcp_world_size": 2}, "pcp_world_size=2"),
        ({"metrics_collector": object()}, "metrics_collector"),
        ({"hash_block_size": 8}, "hash_block_size"),
        (
            {"enable_mamba_shared_prefix_checkpoint": True},
            "enable_mamba_shared_prefix_checkpoint",
        ),
    ],
)
def test_refuses_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        make(**options)


def test_refuses_kinds_of_groups() -> None:
    with pytest.raises(UnsupportedError, match=r"kv_cache_groups\[1\].*Mamba"):
        make(FullAttentionSpec(), MambaSpec())
    with pytest.raises(UnsupportedError, match="use_eagle"):
        make(FullAttentionSpec(), SlidingWindowSpec(), use_eagle=True)
    with pytest.raises(UnsupportedError, match="block_size"):
        make(FullAttentionSpec(), SlidingWindowSpec(block_size=32))
