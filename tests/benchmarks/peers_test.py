"""The peers' own code is what runs, and it does its work."""

import hashlib
import pickle
import sys

import numpy as np
import pytest

from benchmarks.peers import sglang_jax_pool, vllm_core

PROMPT = list(range(1000))  # 62 blocks of 16 and half a one


@pytest.mark.parametrize("name", ["torch", "vllm.config", "vllm.logger"])
def test_stubs_are_gone_after_the_import(name):
    vllm_core.load()
    assert name not in sys.modules


def test_sources_that_are_absent_are_not_stubbed(monkeypatch):
    for name in [m for m in sys.modules if m.partition(".")[0] == "sgl_jax"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    with pytest.raises(ModuleNotFoundError, match="allocator"):
        sglang_jax_pool.load.__wrapped__()


def test_vllm_pool_takes_and_gives_back():
    pool = vllm_core.make_pool(8, caching=True)
    first = pool.get_new_blocks(5)
    assert pool.get_num_free_blocks() == 2  # block 0 is its null
    assert {block.block_id for block in first} == {1, 2, 3, 4, 5}
    with pytest.raises(ValueError, match="Cannot get 3 free blocks"):
        vllm_core.cycle(pool, 3)
    pool.free_blocks(first)
    assert pool.get_num_free_blocks() == 7
    vllm_core.cycle(pool, 7)
    assert pool.get_num_free_blocks() == 7


def test_vllm_hashes_are_chained_sha256_of_pickles():
    def digest(value):
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        return hashlib.sha256(data).digest()

    hashes = vllm_core.hash_blocks(PROMPT)
    assert len(hashes) == 62
    assert hashes[1] == digest((hashes[0], tuple(range(16, 32)), None))
    assert vllm_core.hash_blocks([7, *PROMPT[1:]])[61] != hashes[61]


@pytest.mark.parametrize(("caching", "cached"), [(True, 992), (False, 0)])
def test_vllm_shares_a_cached_prefix(caching, cached):
    manager = vllm_core.make_manager(200, 4096, caching=caching)
    one, two = (
        vllm_core.make_request(name, PROMPT, caching=caching) for name in "ab"
    )
    assert vllm_core.lookup(manager, one) == 0
    assert vllm_core.admit(manager, one) == 0
    assert vllm_core.lookup(manager, two) == cached
    assert vllm_core.admit(manager, two) == cached
    ids = [manager.get_block_ids(name)[0] for name in "ab"]
    assert len(ids[0]) == len(ids[1]) == 63
    assert len({*ids[0], *ids[1]}) == 2 * 63 - cached // 16


@pytest.mark.parametrize("caching", [True, False])
def test_vllm_decodes_across_block_borders(caching):
    manager = vllm_core.make_manager(100, 4096, caching=caching)
    free = manager.block_pool.get_num_free_blocks()
    requests = [
        vllm_core.make_request(str(n), range(n, 2 * n), caching=caching)
        for n in (15, 16, 30)
    ]
    for request in requests:
        assert vllm_core.admit(manager, request) == 0
    grown = []
    for step in range(20):
        vllm_core.append(requests, step)
        grown.append(vllm_core.decode_step(manager, requests))
    assert [[i for i, ids in enumerate(row) if ids] for row in grown[:3]] == [
        [1],
        [0],
        [2],
    ]
    for request, blocks in zip(requests, (3, 3, 4), strict=True):
        assert request.num_computed_tokens == request.num_tokens
        ids = manager.get_block_ids(request.request_id)[0]
        assert len(ids) == blocks
        vllm_core.free(manager, request)
    assert manager.block_pool.get_num_free_blocks() == free


def test_vllm_refuses_what_does_not_fit():
    manager = vllm_core.make_manager(32, 4096, caching=True)
    request = vllm_core.make_request("a", PROMPT, caching=True)
    assert vllm_core.admit(manager, request) is None


def test_sglang_jax_pool_takes_and_gives_back():
    pool = sglang_jax_pool.make_allocator(100, 16)
    slots = sglang_jax_pool.alloc(pool, 1000)
    np.testing.assert_array_equal(slots, np.arange(16, 1016))
    assert sglang_jax_pool.num_free_tokens(pool) == 16 * (100 - 63)
    assert sglang_jax_pool.alloc(pool, 1000) is None
    sglang_jax_pool.free(pool, slots)
    assert sglang_jax_pool.num_free_tokens(pool) == 16 * 100
