"""vLLM's page pool and KV cache manager: its own code, driven as it drives it.

One group of full-attention layers with blocks of 16 tokens. Of its scheduler
only the calls that touch blocks are made, in its order:

    admit(manager, request)              # a prompt's step
    decode_step(manager, requests)       # every later one
    append(requests, token)              # after each, what was sampled
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.stubs import Stub, stubbed

BLOCK_SIZE = 16

# Theirs, loaded on first use: not there when this module is read.
Manager = Any
Request = Any
BlockPool = Any

_MODULES = {
    "hashing": "vllm.utils.hashing",
    "block_pool": "vllm.v1.core.block_pool",
    "manager": "vllm.v1.core.kv_cache_manager",
    "utils": "vllm.v1.core.kv_cache_utils",
    "kinds": "vllm.v1.core.single_type_kv_cache_manager",
    "interface": "vllm.v1.kv_cache_interface",
    "request": "vllm.v1.request",
}


@functools.cache
def load() -> types.SimpleNamespace:
    """Its modules; ModuleNotFoundError if its sources are not there."""
    with stubbed(("cbor2", "torch", "vllm"), real=tuple(_MODULES.values())):
        vllm = types.SimpleNamespace(
            **{k: importlib.import_module(m) for k, m in _MODULES.items()}
        )
        # Asks its platform, a stub, for kinds of cache of its own.
        vllm.kinds.register_all_kvcache_specs(None)
    # Its default: SHA-256 over what pickle makes of a block.
    vllm.hash = vllm.hashing.get_hash_fn_by_name("sha256")
    vllm.utils.init_none_hash(vllm.hash)
    vllm.hash_blocks = vllm.utils.get_request_block_hasher(
        BLOCK_SIZE, vllm.hash
    )
    return vllm


def make_manager(
    num_blocks: int, max_model_len: int, *, caching: bool
) -> Manager:
    """A KVCacheManager over a pool of num_blocks, one of which is its null."""
    vllm = load()
    spec = vllm.interface.FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=Stub
    )
    group = vllm.interface.KVCacheGroupSpec(["layer"], spec)
    config = vllm.interface.KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group]
    )
    return vllm.manager.KVCacheManager(
        config,
        max_model_len=max_model_len,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
    )


def make_request(name: str, tokens: Sequence[int], *, caching: bool) -> Request:
    """A request with a prompt; hashes the prompt's blocks if caching.

    Theirs, with the fields that block management reads and no others: sampling
    parameters, statistics and multi-modal inputs are left out. all_token_ids is
    the list itself and not their read-only view of it, which is slower.
    """
    vllm = load()
    request = vllm.request.Request.__new__(vllm.request.Request)
    all_tokens = list(tokens)
    vars(request).update(
        request_id=name,
        status=vllm.request.RequestStatus.WAITING,
        num_prompt_tokens=len(all_tokens),
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_preemptions=0,
        all_token_ids=all_tokens,
        _all_token_ids=all_tokens,
        _output_token_ids=[],
        prompt_embeds=None,
        spec_token_ids=[],
        mm_features=[],
        lora_request=None,
        cache_salt=None,
        session_id=None,
        shared_prefix_boundary=0,
        replay_start=0,
        skip_reading_prefix_cache=False,
        block_hashes=[],
        _block_hasher=vllm.hash_blocks if caching else None,
    )
    request.update_block_hashes()
    return request


def hash_blocks(tokens: Sequence[int]) -> list[bytes]:
    """The chained hashes of a prompt's full blocks."""
    hashes: list[bytes] = make_request("", tokens, caching=True).block_hashes
    return hashes


def lookup(manager: Manager, request: Request) -> int:
    """How many of a request's tokens the prefix cache holds."""
    cached: int = manager.get_computed_blocks(request)[1]
    return cached


def admit(manager: Manager, request: Request) -> int | None:
    """Looks a prompt up, allocates and caches its blocks, as if it were run.

    Returns:
        How many of its tokens were cached; None if the pool has too few blocks.
    """
    blocks, cached, _ = manager.get_computed_blocks(request)
    new_tokens = request.num_tokens - cached
    if manager.allocate_slots(request, new_tokens, cached, blocks) is None:
        return None
    manager.get_block_ids(request.request_id)
    request.num_computed_tokens = request.num_tokens
    request.status = load().request.RequestStatus.RUNNING
    return int(cached)


def decode_step(
    manager: Manager, requests: Sequence[Request]
) -> list[list[int] | None]:
    """Allocates a slot for each request's last token.

    Returns:
        Each request's new block ids, None where its last block has room.
    """
    manager.new_step_starts()
    new_ids = []
    for request in requests:
        blocks = manager.allocate_slots(request, 1)
        if blocks is None:
            raise RuntimeError(f"no block is left for {request.request_id}")
        ids = blocks.get_block_ids(allow_none=True)
        new_ids.append(ids and ids[0])
        request.num_computed_tokens += 1
    return new_ids


def append(requests: Sequence[Request], token: int) -> None:
    """Appends a sampled token to each request; hashes blocks that it fills."""
    for request in requests:
        request.append_output_token_ids(token)


def free(manager: Manager, request: Request) -> None:
    """Gives a request's blocks back."""
    manager.free(request)


def make_pool(num_blocks: int, *, caching: bool) -> BlockPool:
    """A bare BlockPool."""
    return load().block_pool.BlockPool(num_blocks, caching, BLOCK_SIZE)


def cycle(pool: BlockPool, num_blocks: int) -> None:
    """Takes blocks from a pool and gives them back."""
    pool.free_blocks(pool.get_new_blocks(num_blocks))
