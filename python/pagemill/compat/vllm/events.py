"""What a block pool tells others about its cache, with vLLM's fields."""

from __future__ import annotations

import dataclasses
from typing import Any

MEDIUM_GPU = "GPU"

# A block's hash, or the integer of its last 8 bytes.
ExternalBlockHash = bytes | int


@dataclasses.dataclass
class BlockStored:
    """Consecutive blocks of a request were cached."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    session_id: str | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


@dataclasses.dataclass
class BlockRemoved:
    """Blocks were evicted."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None = None
    group_idx: int | None = None


@dataclasses.dataclass
class AllBlocksCleared:
    """The cache was reset."""
