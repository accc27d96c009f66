"""KVCacheManager: which request holds which blocks, and what it can reuse."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pagemill.compat.vllm import events as own_events
from pagemill.compat.vllm import options
from pagemill.compat.vllm.block_pool import BlockPool
from pagemill.compat.vllm.blocks import KVCacheBlock, KVCacheBlocks
from pagemill.compat.vllm.groups import ceil_div, make_groups
from pagemill.compat.vllm.lookup import Lookup
from pagemill.compat.vllm.stats import PrefixCacheStats
from pagemill.errors import PagemillError

_WAITING = ("WAITING", "PREEMPTED")


class KVCacheManager:
    """Takes the place of ``vllm.v1.core.kv_cache_manager.KVCacheManager``.

    Args:
      kv_cache_config: ``num_blocks`` and ``kv_cache_groups`` are read, each
        with its ``kv_cache_spec``.
      max_model_len: tokens that a request has at most.
      scheduler_block_size: the groups' block size.
      hash_block_size: likewise.
      max_in_flight_tokens: tokens that are scheduled and not settled, at most;
        None: max_model_len.
      enable_caching: whether prefixes are found and shared.
      use_eagle: whether a hit's last block is computed again.
      num_prefill_lookahead: tokens past a chunk that drafting wrote.
      log_stats: whether :meth:`make_prefix_cache_stats` has something to say.
      enable_kv_cache_events: whether :meth:`take_events` has.
      dcp_world_size: must be 1.
      pcp_world_size: must be 1.
      metrics_collector: must be None.
      watermark: share of the blocks to keep free when a request is admitted.
      enable_mamba_shared_prefix_checkpoint: must be False.
      kv_events: module or namespace with the events' classes.
    """

    def __init__(
        self,
        kv_cache_config: Any,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_in_flight_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        num_prefill_lookahead: int = 0,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: None = None,
        watermark: float = 0.0,
        enable_mamba_shared_prefix_checkpoint: bool = False,
        *,
        kv_events: Any = own_events,
    ) -> None:
        options.refuse(
            dcp_world_size=(dcp_world_size, 1),
            pcp_world_size=(pcp_world_size, 1),
            enable_mamba_shared_prefix_checkpoint=(
                bool(enable_mamba_shared_prefix_checkpoint),
                False,
            ),
        )
        if watermark < 0:
            raise PagemillError(f"watermark={watermark} must be at least 0.")
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        self.block_pool = BlockPool(
            kv_cache_config.num_blocks,
            enable_caching,
            hash_block_size,
            enable_kv_cache_events,
            metrics_collector,
            kv_events=kv_events,
        )
        self._core = self.block_pool.core
        self._stored_event = kv_events.BlockStored
        self.groups = make_groups(
            kv_cache_config,
            self.block_pool,
            max_in_flight_tokens=(
                max_model_len
                if max_in_flight_tokens is None
                else max_in_flight_tokens
            ),
            max_model_len=max_model_len,
            use_eagle=use_eagle,
        )
        self.num_kv_cache_groups = len(self.groups)
        # What a scheduler asks on behalf of other kinds of groups.
        self.metrics_collector = None
        self.mamba_shared_prefix_checkpoint = False
        self.retained_hit_group_ids: tuple[int, ...] = ()
        options.check_retention(kv_cache_config, self.groups)
        if enable_caching:
            options.check_block_sizes(
                self.groups, scheduler_block_size, hash_block_size
            )
        self._lookup = Lookup(self.groups)
        self._uncached_tail = options.uncached_tail(
            self.groups, num_prefill_lookahead, caching=enable_caching
        )
        self._may_need_nothing = self.watermark_blocks == 0 and all(
            group.window is None for group in self.groups
        )
        # Ids of new blocks, for whoever has to zero them.
        self._zeroed = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
        self._new_block_ids: list[list[int]] = [[] for _ in self.groups]
        self.empty_kv_cache_blocks = KVCacheBlocks(((),) * len(self.groups))

    # --------------------------------------------------------------- usage

    @property
    def usage(self) -> float:
        """Share of the blocks that are held."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """What was counted since the last call; None without log_stats."""
        stats = self.prefix_cache_stats
        if self.log_stats:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Counts a request that was looked up."""
        if self.prefix_cache_stats is None:
            return
        if self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                request.num_tokens, num_hits, request.num_preemptions > 0
            )

    def take_events(self) -> list[Any]:
        """What happened to the cache since the last call, in order."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, self._stored_event):
                group = self.groups[event.group_idx]
                event.kv_cache_spec_kind = group.kind
                event.kv_cache_spec_sliding_window = group.window
        return events

    # -------------------------------------------------------------- lookup

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Whether a request may use what is cached."""
        return self.enable_caching and not getattr(
            request, "skip_reading_prefix_cache", False
        )

    def get_computed_blocks(
        self, request: Any
    ) -> tuple[KVCacheBlocks, int, int]:
        """Looks up the longest cached prefix that leaves a token to compute.

        Returns:
          Its blocks, which are not held yet; its number of tokens; and where a
          longer prefix ends that only some groups have, 0 if there is none.
        """
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        ids, hit, longest = self._lookup.find(
            request.block_hashes, request.num_tokens - 1
        )
        if (
            hit
            and self.enable_kv_cache_events
            and getattr(request, "kv_cache_report_mode", "") == "full"
        ):
            for group, found in zip(self.groups, ids, strict=True):
                self.block_pool.emit_cached_block_events(
                    request, len(found), group.block_size, group.index
                )
        return self._make(ids), hit, longest if longest > hit else 0

    def get_computed_blocks_for_connector(
        self, request: Any
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        """The same; groups never disagree here."""
        return *self.get_computed_blocks(request), False

    # ---------------------------------------------------------- allocation

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> KVCacheBlocks | None:
        """Gives a request room for new tokens and caches what they will fill.

        Args:
          request: its ``num_computed_tokens`` come first.
          num_new_tokens: tokens to compute, drafts included.
          num_new_computed_tokens: tokens found by :meth:`get_computed_blocks`.
          new_computed_blocks: their blocks.
          num_lookahead_tokens: room for drafts behind them.
          num_external_computed_tokens: tokens that a connector brings.
          delay_cache_blocks: cache nothing yet.
          num_encoder_tokens: of no group here.
          full_sequence_must_fit: refuse unless all its tokens would fit.
          reserved_blocks: free blocks to leave.
          has_scheduled_reqs: whether the watermark counts.
          skip_zeroing_group_ids: groups whose blocks for external tokens are
            not for :meth:`take_new_block_ids`.

        Returns:
          The new blocks; None if there are too few.
        """
        del num_encoder_tokens
        if not (
            num_new_tokens
            or num_external_computed_tokens
            or num_new_computed_tokens
        ):
            raise PagemillError(
                "num_new_tokens=0 must be positive where there are no "
                "computed tokens either."
            )
        request_id = request.request_id
        local = request.num_computed_tokens + num_new_computed_tokens
        total = min(local + num_external_computed_tokens, self.max_model_len)
        need_slot = min(
            total + num_new_tokens + num_lookahead_tokens, self.max_model_len
        )
        to_cache = (
            0
            if delay_cache_blocks
            else min(total + num_new_tokens, request.num_tokens)
        )
        if (
            new_computed_blocks is None
            and self._may_need_nothing
            and not (full_sequence_must_fit or reserved_blocks)
            and self._needs_nothing(request_id, need_slot, to_cache)
        ):
            return self.empty_kv_cache_blocks
        computed = self._computed_ids(request_id, new_computed_blocks)
        spare = self._watermark(request) if has_scheduled_reqs else 0
        if full_sequence_must_fit:
            all_tokens = min(request.num_tokens, self.max_model_len)
            need = self._count_needed(
                request_id, all_tokens, computed, total, capped=True
            )
            if need + spare > self._core.num_free:
                return None
        self.remove_skipped_blocks(
            request_id,
            max(0, total - getattr(request, "num_in_flight_tokens", 0)),
        )
        need = self._count_needed(request_id, need_slot, computed, total)
        if need + spare > self._core.num_free - reserved_blocks:
            return None
        given = new_computed_blocks is not None and (
            new_computed_blocks is not self.empty_kv_cache_blocks
        )
        if given or num_external_computed_tokens > 0:
            self._adopt(
                request_id,
                computed,
                local + num_external_computed_tokens,
                num_external_computed_tokens,
                skip_zeroing_group_ids,
            )
        new = tuple(
            group.extend(request_id, need_slot) for group in self.groups
        )
        if self._zeroed:
            for group, ids in zip(self.groups, new, strict=True):
                self._new_block_ids[group.index] += ids
        self.cache_blocks(request, to_cache)
        return self._make(new)

    def _needs_nothing(
        self, request_id: str, need_slot: int, to_cache: int
    ) -> bool:
        """Whether a request has room, and fills no block: most decode steps."""
        if not self.enable_caching:
            to_cache = 0
        return all(
            group.needs_nothing(request_id, need_slot, to_cache)
            for group in self.groups
        )

    def _computed_ids(
        self, request_id: str, blocks: KVCacheBlocks | None
    ) -> tuple[Sequence[int], ...]:
        if blocks is None:
            return self.empty_kv_cache_blocks.ids
        if not any(blocks.ids):
            return blocks.ids
        if blocks.pool is not self.block_pool:
            raise PagemillError(
                "new_computed_blocks belong to another pool. Pass what "
                "get_computed_blocks of this manager returned."
            )
        if self._is_known(request_id):
            raise PagemillError(
                f"new_computed_blocks must be empty: request {request_id} "
                "holds blocks already. Pass them when it is admitted."
            )
        return blocks.ids

    def _is_known(self, request_id: str) -> bool:
        return any(
            request_id in group.num_cached or group.tables.get(request_id)
            for group in self.groups
        )

    def _watermark(self, request: Any) -> int:
        status = getattr(request.status, "name", request.status)
        return self.watermark_blocks if status in _WAITING else 0

    def _count_needed(
        self,
        request_id: str,
        num_tokens: int,
        computed: Sequence[Sequence[int]],
        num_computed_tokens: int,
        *,
        capped: bool = False,
    ) -> int:
        return sum(
            group.count_needed(
                request_id, num_tokens, ids, num_computed_tokens, capped=capped
            )
            for group, ids in zip(self.groups, computed, strict=True)
        )

    def _adopt(
        self,
        request_id: str,
        computed: Sequence[Sequence[int]],
        num_computed_tokens: int,
        num_external_tokens: int,
        skip_zeroing_group_ids: Sequence[int],
    ) -> None:
        if self._is_known(request_id):
            return
        # All groups' finds are held before one takes blocks: those might be
        # what another has found.
        for group, ids in zip(self.groups, computed, strict=True):
            group.adopt(request_id, ids, num_computed_tokens)
        if num_external_tokens <= 0:
            return
        for group in self.groups:
            if group.passed_tokens(num_computed_tokens) == num_computed_tokens:
                continue
            new = group.extend(request_id, num_computed_tokens)
            if self._zeroed and group.index not in skip_zeroing_group_ids:
                self._new_block_ids[group.index] += new

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """Caches a request's blocks that its computed tokens fill."""
        if not self.enable_caching:
            return
        num_tokens = max(0, num_computed_tokens - self._uncached_tail)
        for group in self.groups:
            group.cache(request, num_tokens)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Gives back blocks that the sliding windows have passed.

        Args:
          request_id: whose.
          processed_computed_tokens: tokens that are settled.
          num_prompt_tokens: of no group here.
        """
        del num_prompt_tokens
        for group in self.groups:
            if group.window is not None:
                group.trim(request_id, processed_computed_tokens)

    # ---------------------------------------------------------- giving back

    def free(self, request: Any) -> None:
        """Gives a request's blocks back, the last first."""
        for group in self.groups:
            self._core.release(group.pop(request.request_id)[::-1])

    def pop_blocks_for_free(self, request: Any) -> list[KVCacheBlock]:
        """Forgets a request; whoever calls gives its blocks back, reversed."""
        return self.block_pool.make_blocks(
            i for group in self.groups for i in group.pop(request.request_id)
        )

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Takes blocks out of the cache, by their ids."""
        self.block_pool.evict_blocks(block_ids)

    def reset_prefix_cache(self) -> bool:
        """Empties the cache; False while blocks are held."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    # --------------------------------------------------------------- tables

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """A request's blocks; those of one that is not known are empty."""
        return self._make(
            tuple(group.tables.get(request_id, []) for group in self.groups)
        )

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Their ids."""
        return tuple(
            [*group.tables.get(request_id, ())] for group in self.groups
        )

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Ids of the blocks that hold its first tokens."""
        return tuple(
            group.tables.get(request_id, [])[
                : ceil_div(num_computed_tokens, group.block_size)
            ]
            for group in self.groups
        )

    def get_num_common_prefix_blocks(
        self, running_request_id: str
    ) -> list[int]:
        """0 for each group, as vLLM returns since it has no cascade."""
        del running_request_id
        return [0] * self.num_kv_cache_groups

    def estimate_cached_tokens(self, request: Any) -> int:
        """How many of a request's tokens every group has cached."""
        return min(
            (
                max(
                    (
                        self._core.num_tokens_of(i) or 0
                        for i in group.tables.get(request.request_id, ())
                    ),
                    default=0,
                )
                for group in self.groups
            ),
            default=0,
        )

    def create_kv_cache_blocks(
        self, blocks: tuple[list[KVCacheBlock], ...]
    ) -> KVCacheBlocks:
        """From blocks of each group."""
        return (
            KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks
        )

    def truncate_computed_blocks(
        self, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> KVCacheBlocks:
        """The part of a found prefix that ends at a block's end."""
        parts = []
        for group, ids in zip(self.groups, blocks.ids, strict=True):
            end, rest = divmod(num_computed_tokens, group.block_size)
            if rest or end > len(ids):
                raise PagemillError(
                    f"num_computed_tokens={num_computed_tokens} must be a "
                    f"multiple of block_size={group.block_size} and at most "
                    f"the {len(ids) * group.block_size} tokens of the blocks."
                )
            parts.append([*ids[:end]])
        return self._make(tuple(parts))

    def take_new_block_ids(self) -> list[int]:
        """Ids of blocks to zero that were given out since the last call."""
        ids = [i for record in self._new_block_ids for i in record]
        self._new_block_ids = [[] for _ in self.groups]
        return ids

    def record_blocks_for_zeroing(
        self, request_id: str, start_token: int
    ) -> None:
        """Lists a request's blocks from a token on for zeroing once more."""
        if not self._zeroed:
            return
        for group in self.groups:
            start, rest = divmod(start_token, group.block_size)
            if rest:
                raise PagemillError(
                    f"start_token={start_token} must be a multiple of "
                    f"block_size={group.block_size}."
                )
            self._new_block_ids[group.index] += group.tables[request_id][start:]

    # ------------------------------------ what only other kinds of groups do

    def take_kv_cache_block_copies(
        self,
    ) -> tuple[list[Any], list[KVCacheBlock]]:
        """Nothing: full blocks only are shared."""
        return [], []

    def take_boundary_state_offloads(
        self,
    ) -> dict[str, list[tuple[int, int, int]]]:
        """Nothing: there are no states."""
        return {}

    def finalize_partial_tail_offloads(
        self, request: Any
    ) -> list[tuple[int, int, int]]:
        """Nothing: there are no states."""
        del request
        return []

    def new_step_starts(self) -> None:
        """Nothing to do."""

    def _make(self, ids: tuple[Sequence[int], ...]) -> KVCacheBlocks:
        if not any(ids):
            return self.empty_kv_cache_blocks
        return KVCacheBlocks.of_ids(self.block_pool, ids)
