"""Stands in for parts of ``vllm.v1.core``: its block pool and cache manager.

Same names, signatures and results as vLLM 0.32's ``BlockPool`` and
``KVCacheManager``, block ids and the order of eviction included, over
Pagemill's C++ pool. vLLM is not imported: requests, cache configs and specs are
read by their attributes, and blocks are objects made on demand, one for a block
that somebody looks at.

What differs:

- Wrong use raises :class:`pagemill.PagemillError`, a ValueError that names the
  block, and changes nothing, where vLLM's counts go below zero or an assertion
  fails: freeing twice, blocks of another pool, caching a block twice, touching
  a block that is free and holds nothing.
- ``KVCacheManager`` takes groups of full attention (also MLA's) and of sliding
  windows, with one block size for all and for the hashes. Other kinds of
  groups, context parallelism, EAGLE with several groups, metrics collectors
  and sparse retention are refused by name when it is made. Since there are no
  partly cached blocks without these, neither are the pool's methods for them.
- Events are this package's own classes with vLLM's fields; pass
  ``kv_events=vllm.distributed.kv_events`` to get vLLM's.
"""

from pagemill.compat.vllm.block_pool import BlockPool
from pagemill.compat.vllm.blocks import KVCacheBlock, KVCacheBlocks
from pagemill.compat.vllm.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
)
from pagemill.compat.vllm.kv_cache_manager import KVCacheManager
from pagemill.compat.vllm.stats import PrefixCacheStats

__all__ = [
    "AllBlocksCleared",
    "BlockPool",
    "BlockRemoved",
    "BlockStored",
    "KVCacheBlock",
    "KVCacheBlocks",
    "KVCacheManager",
    "PrefixCacheStats",
]
