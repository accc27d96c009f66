"""BlockPool: blocks that are taken, shared, cached by hash and evicted."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

from pagemill import _core
from pagemill.compat.vllm import events as own_events
from pagemill.compat.vllm.blocks import NULL, KVCacheBlock
from pagemill.errors import PagemillError, UnsupportedError

_LOGGER = logging.getLogger(__name__)


class BlockPool:
    """Takes the place of ``vllm.v1.core.block_pool.BlockPool``.

    Methods of vLLM's names speak of :class:`KVCacheBlock` objects; ``take``,
    ``cache_ids`` and what ``core`` has, of ids.

    Args:
      num_gpu_blocks: blocks, of which block 0 is the null block.
      enable_caching: whether blocks can be cached by their hashes.
      hash_block_size: tokens that one of a request's ``block_hashes`` covers.
      enable_kv_cache_events: whether :meth:`take_events` has something to say.
      metrics_collector: must be None.
      medium: the name of the storage in events.
      kv_events: module or namespace with the events' classes.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: None = None,
        medium: str = own_events.MEDIUM_GPU,
        *,
        kv_events: Any = own_events,
    ) -> None:
        if metrics_collector is not None:
            raise UnsupportedError(
                "metrics_collector cannot be honoured: no hook is called when "
                "blocks change hands. Pass None."
            )
        self.num_gpu_blocks = operator.index(num_gpu_blocks)
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.medium = medium
        self.core = _core.BlockPool(
            self.num_gpu_blocks, enable_caching, enable_kv_cache_events
        )
        self.null_block = KVCacheBlock(NULL, self)
        self._kv_events = kv_events
        self._queue: list[Any] = []
        # vLLM's own switch, on unless it is set to 0.
        self._int_hashes = (
            os.environ.get("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1") != "0"
        )

    @property
    def blocks(self) -> Sequence[KVCacheBlock]:
        """All blocks by their ids, each made when it is asked for."""
        return _Blocks(self)

    # ------------------------------------------------------------- holders

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Takes blocks, held once each, evicting what was cached in them."""
        return self.make_blocks(self.take(num_blocks))

    def take(self, num_blocks: int) -> list[int]:
        """Ids of new blocks."""
        free = self.core.num_free
        if num_blocks > free:
            # A ValueError, as vLLM's is.
            raise PagemillError(
                f"num_blocks={num_blocks} must be at most the {free} free "
                "blocks. Free a request's blocks, or ask "
                "get_num_free_blocks() first."
            )
        ids = self.core.take(num_blocks)
        if self.enable_kv_cache_events:
            self._note_evicted()
        return ids

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Holds blocks once more, also those that might have been evicted."""
        self.core.share(self.ids_of(blocks))

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Lets go of blocks; the first is the first to be evicted."""
        self.core.release(self.ids_of(ordered_blocks))

    def is_block_writable(self, block: KVCacheBlock) -> bool:
        """Whether it is held once and not cached."""
        return (
            not block.is_null
            and block.ref_cnt == 1
            and block.block_hash is None
        )

    def get_num_free_blocks(self) -> int:
        """How many blocks can be taken, the cached ones included."""
        return self.core.num_free

    def get_usage(self) -> float:
        """Share of the blocks that are held, the null block apart."""
        usable = self.num_gpu_blocks - 1
        return 1.0 - self.core.num_free / usable if usable else 0

    # --------------------------------------------------------------- cache

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """The block of each group with a hash; None if a group has none."""
        ids = self.core.find(block_hash, kv_cache_group_ids)
        return None if ids is None else self.make_blocks(ids)

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Caches blocks[num_cached_blocks:num_full_blocks] of a request.

        Args:
          request: has the hashes, ``block_hashes``.
          blocks: all blocks of the request.
          num_cached_blocks: how many were cached before, or passed over.
          num_full_blocks: how many are full.
          block_size: tokens of a block; a multiple of ``hash_block_size``.
          kv_cache_group_id: the group they are found in.
          block_mask: False for those, of the new ones, to pass over; null
            blocks always are.
        """
        self.cache_ids(
            request,
            self.ids_of(blocks[num_cached_blocks:num_full_blocks]),
            num_cached_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )

    def cache_ids(
        self,
        request: Any,
        ids: Sequence[int],
        start: int,
        block_size: int,
        group: int,
        mask: Sequence[bool] | None = None,
    ) -> None:
        """Caches a request's blocks from its start-th on."""
        if not ids:
            return
        if mask is not None and len(mask) != len(ids):
            raise PagemillError(
                f"block_mask has {len(mask)} entries and must have one for "
                f"each of the {len(ids)} new full blocks."
            )
        picked = [
            i
            for i, block in enumerate(ids)
            if block != NULL and (mask is None or mask[i])
        ]
        hashes = self._block_hashes(request, start + len(ids), block_size)
        new_hashes = [hashes[start + i] for i in picked]
        self.core.publish(
            [ids[i] for i in picked],
            new_hashes,
            [(start + i + 1) * block_size for i in picked],
            group,
        )
        if self.enable_kv_cache_events:
            end = start + len(ids)
            self._note_stored(
                request, hashes, [start + i for i in picked], start, end,
                block_size, group,
            )  # fmt: skip

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the cache, by their ids; held ones stay held."""
        self.core.forget(list(block_ids))
        if self.enable_kv_cache_events:
            self._note_evicted()

    def reset_prefix_cache(self) -> bool:
        """Empties the cache; False while blocks are held."""
        if not self.core.reset():
            _LOGGER.warning(
                "The prefix cache was not reset: %d blocks are held.",
                self.num_gpu_blocks - 1 - self.core.num_free,
            )
            return False
        if self.enable_kv_cache_events:
            self._queue.append(self._kv_events.AllBlocksCleared())
        return True

    # -------------------------------------------------------------- events

    def take_events(self) -> list[Any]:
        """What happened since the last call, in order."""
        taken, self._queue = self._queue, []
        return taken

    def emit_cached_block_events(
        self,
        request: Any,
        num_cached_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Tells the first blocks of a request, which were found, once more."""
        if not self.enable_kv_cache_events or num_cached_blocks == 0:
            return
        hashes = self._block_hashes(request, num_cached_blocks, block_size)
        self._note_stored(
            request, hashes, range(num_cached_blocks), 0, num_cached_blocks,
            block_size, kv_cache_group_id,
        )  # fmt: skip

    def _note_evicted(self) -> None:
        for joined in self.core.take_evicted():
            self._queue.append(
                self._kv_events.BlockRemoved(
                    block_hashes=[self._external(joined[:-4])],
                    medium=self.medium,
                    group_idx=int.from_bytes(joined[-4:], "big"),
                )
            )

    def _note_stored(
        self,
        request: Any,
        hashes: Sequence[bytes],
        stored: Sequence[int],
        start: int,
        end: int,
        block_size: int,
        group: int,
    ) -> None:
        lora = request.lora_request
        self._queue.append(
            self._kv_events.BlockStored(
                block_hashes=[self._external(hashes[i]) for i in stored],
                parent_block_hash=(
                    self._external(hashes[start - 1]) if start else None
                ),
                token_ids=request.all_token_ids[
                    start * block_size : end * block_size
                ],
                block_size=block_size,
                lora_id=lora.adapter_id if lora else None,
                medium=self.medium,
                lora_name=lora.name if lora else None,
                extra_keys=[_extra_keys(request, i) for i in stored] or None,
                group_idx=group,
                session_id=getattr(request, "session_id", None),
            )
        )

    def _external(self, block_hash: bytes) -> own_events.ExternalBlockHash:
        if not self._int_hashes:
            return block_hash
        return int.from_bytes(block_hash[-8:], "big")

    # ------------------------------------------------------------- helpers

    def make_blocks(self, ids: Iterable[int]) -> list[KVCacheBlock]:
        """Objects for ids."""
        return [KVCacheBlock(i, self) for i in ids]

    def ids_of(self, blocks: Iterable[KVCacheBlock]) -> list[int]:
        """Ids of this pool's blocks."""
        ids = []
        for block in blocks:
            if block.pool is not self:
                raise PagemillError(
                    f"block {block.block_id} belongs to another pool. Pass "
                    "blocks to the pool that gave them."
                )
            ids.append(block.block_id)
        return ids

    def _block_hashes(
        self, request: Any, num_blocks: int, block_size: int
    ) -> Sequence[bytes]:
        """A request's hashes, one a block; at least num_blocks."""
        hashes: Sequence[bytes] = request.block_hashes
        if block_size != self.hash_block_size:
            factor, rest = divmod(block_size, self.hash_block_size)
            if rest or not factor:
                raise PagemillError(
                    f"block_size={block_size} must be a multiple of "
                    f"hash_block_size={self.hash_block_size}."
                )
            # A hash stands for all tokens before its end as well.
            hashes = hashes[factor - 1 :: factor]
        if len(hashes) < num_blocks:
            raise PagemillError(
                f"request {request.request_id} has block_hashes for "
                f"{len(hashes)} blocks and must have them for {num_blocks}. "
                "Hash its tokens before caching them."
            )
        return hashes


class _Blocks(Sequence[KVCacheBlock]):
    """All blocks of a pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __len__(self) -> int:
        return self._pool.num_gpu_blocks

    def __getitem__(self, index: Any) -> Any:
        ids = range(len(self))[index]
        if isinstance(ids, range):
            return self._pool.make_blocks(ids)
        return KVCacheBlock(ids, self._pool)


def _extra_keys(request: Any, index: int) -> tuple[Any, ...] | None:
    """What went into a block's hash beside its tokens."""
    for name in ("mm_features", "prompt_embeds"):
        value = getattr(request, name, None)
        if value is not None and len(value):
            raise UnsupportedError(
                f"request {request.request_id} has {name}, which events "
                "cannot tell. Pass enable_kv_cache_events=False."
            )
    lora = request.lora_request
    keys = [lora.lora_name] if lora else []
    if index == 0 and request.cache_salt:
        keys.append(request.cache_salt)
    return tuple(keys) or None
