"""What a KVCacheManager was asked for, held against what it can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pagemill.compat.vllm.groups import Group
from pagemill.errors import PagemillError, UnsupportedError


def refuse(**options: tuple[Any, Any]) -> None:
    """Refuses options that have another value than the only one, by name."""
    for name, (value, only) in options.items():
        if value != only:
            raise UnsupportedError(
                f"{name}={value} cannot be honoured: it must be {only}."
            )


def check_block_sizes(
    groups: Sequence[Group], scheduler_block_size: int, hash_block_size: int
) -> None:
    """With caching, all blocks are of one size, and so are the hashes."""
    if not groups:
        raise UnsupportedError(
            "enable_caching=True needs a KV cache group. Pass False."
        )
    sizes = {group.block_size for group in groups}
    sizes |= {scheduler_block_size, hash_block_size}
    if len(sizes) > 1:
        raise UnsupportedError(
            "scheduler_block_size, hash_block_size and the block_size of "
            f"every group must be equal, not {sorted(sizes)}. Pass "
            "enable_caching=False, or use vLLM's own manager."
        )


def check_retention(config: Any, groups: Sequence[Group]) -> None:
    """Every block is cached; 0 says nothing to groups of full attention."""
    interval = getattr(config, "prefix_cache_retention_interval", None)
    windows = any(group.window is not None for group in groups)
    if interval is None or (interval == 0 and not windows):
        return
    raise UnsupportedError(
        f"prefix_cache_retention_interval={interval} cannot be honoured: "
        "every block is cached. Pass None."
    )


def uncached_tail(
    groups: Sequence[Group], num_prefill_lookahead: int, *, caching: bool
) -> int:
    """How many of the last computed tokens may be written once more."""
    if caching and any(group.drop_last for group in groups):
        size = groups[0].block_size
        if num_prefill_lookahead > size:
            raise PagemillError(
                f"num_prefill_lookahead={num_prefill_lookahead} must be at "
                f"most scheduler_block_size={size} with use_eagle and "
                "enable_caching."
            )
    return max(0, num_prefill_lookahead - 1) if len(groups) == 1 else 0
