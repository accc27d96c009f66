"""KV cache groups: each request's blocks for layers of one kind.

A group keeps a list of block ids for each request, NULL where a sliding window
has passed; ids and not blocks throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pagemill.compat.vllm.block_pool import BlockPool
from pagemill.compat.vllm.blocks import NULL
from pagemill.errors import PagemillError, UnsupportedError

Kind = Literal["full_attention", "mla_attention", "sliding_window"]

# vLLM's classes, by name: subclasses of them may mean something else.
_KINDS: dict[str, Kind] = {
    "FullAttentionSpec": "full_attention",
    "MLAAttentionSpec": "mla_attention",
    "SlidingWindowSpec": "sliding_window",
}


def ceil_div(a: int, b: int) -> int:
    """The quotient, rounded up."""
    return -(-a // b)


class Group:
    """A group of full attention: every block is kept.

    Attributes:
      index: its place among the groups.
      spec: of its layers.
      kind: its name in events.
      block_size: tokens of a block.
      window: keys that a query sees; None: all.
      max_blocks: what one request holds at most, where blocks are given back.
      drop_last: whether a hit leaves its last block to be computed again.
      tables: block ids of each request.
      num_cached: for each running request, how many of its blocks are cached
        or never will be.
    """

    max_blocks: int | None = None

    def __init__(
        self, spec: Any, index: int, pool: BlockPool, *, drop_last: bool
    ) -> None:
        self.spec = spec
        self.index = index
        self.kind = _KINDS[type(spec).__name__]
        self.block_size: int = spec.block_size
        self.window: int | None = None
        self.drop_last = drop_last
        self.tables: dict[str, list[int]] = {}
        self.num_cached: dict[str, int] = {}
        self._pool = pool
        self._core = pool.core

    def passed_tokens(self, num_tokens: int) -> int:
        """Tokens at the front that none at or past num_tokens needs."""
        del num_tokens
        return 0

    def passed_blocks(self, num_tokens: int) -> int:
        """Blocks full of such tokens."""
        return self.passed_tokens(num_tokens) // self.block_size

    def count_needed(
        self,
        request_id: str,
        num_tokens: int,
        computed: Sequence[int],
        num_computed_tokens: int,
        *,
        capped: bool = False,
    ) -> int:
        """Free blocks it takes to give a request room for num_tokens.

        Args:
          request_id: which.
          num_tokens: all tokens that need room.
          computed: blocks found for it, which it does not hold yet.
          num_computed_tokens: tokens that need not be computed.
          capped: as if blocks were given back in between.
        """
        required = ceil_div(num_tokens, self.block_size)
        if capped and self.max_blocks is not None:
            required = min(required, self.max_blocks)
        held = len(self.tables.get(request_id, ()))
        if request_id in self.num_cached:
            return max(required - held, 0)
        passed = self.passed_blocks(num_computed_tokens)
        needed = max(required - max(passed, held + len(computed)), 0)
        # Those that nobody holds count as free until they are held.
        kept = computed[max(0, passed - held) :]
        return needed + self._core.count_released(kept)

    def needs_nothing(
        self, request_id: str, num_tokens: int, num_to_cache: int
    ) -> bool:
        """Whether a request has room and fills no block that is not cached."""
        room = len(self.tables.get(request_id, ())) * self.block_size
        cached = self.num_cached.get(request_id, 0)
        return room >= num_tokens and num_to_cache // self.block_size <= cached

    def adopt(
        self,
        request_id: str,
        computed: Sequence[int],
        num_computed_tokens: int,
    ) -> None:
        """Gives a new request the blocks that were found for it."""
        passed = self.passed_blocks(num_computed_tokens)
        kept = list(computed[passed:])
        self._core.share(kept)
        self.tables[request_id] = [NULL] * passed + kept
        self.num_cached[request_id] = passed + len(kept)

    def extend(self, request_id: str, num_tokens: int) -> list[int]:
        """New blocks, so that a request has room for num_tokens."""
        table = self.tables.setdefault(request_id, [])
        missing = ceil_div(num_tokens, self.block_size) - len(table)
        if missing <= 0:
            return []
        new = self._pool.take(missing)
        table += new
        return new

    def cache(self, request: Any, num_tokens: int) -> None:
        """Caches a request's blocks that num_tokens fill."""
        start = self.num_cached.get(request.request_id, 0)
        end = num_tokens // self.block_size
        if start >= end:
            return
        self._pool.cache_ids(
            request,
            self.tables[request.request_id][start:end],
            start,
            self.block_size,
            self.index,
            self.reachable(end - start),
        )
        self.num_cached[request.request_id] = end

    def reachable(self, num_blocks: int) -> list[bool] | None:
        """Which of some blocks a lookup may return; None: all."""
        del num_blocks
        return None

    def trim(self, request_id: str, num_tokens: int) -> None:
        """Gives back what no token at or past num_tokens needs."""
        table = self.tables.get(request_id)
        end = self.passed_blocks(num_tokens)
        if not table or not end:
            return
        end = min(end, len(table))
        # What is before a null was given back earlier.
        start = end
        while start > 0 and table[start - 1] != NULL:
            start -= 1
        self._core.release(table[start:end][::-1])
        table[start:end] = [NULL] * (end - start)

    def pop(self, request_id: str) -> list[int]:
        """Forgets a request; its blocks are still held."""
        self.num_cached.pop(request_id, None)
        return self.tables.pop(request_id, [])

    def find(
        self, hashes: Sequence[bytes], limit: int, groups: list[int]
    ) -> list[list[int]]:
        """The longest cached prefix of at most limit blocks, for each group."""
        found: list[list[int]] = self._core.find_prefix(hashes, limit, groups)
        if self.drop_last:
            for ids in found:
                del ids[-1:]
        return found


class WindowGroup(Group):
    """A group of a sliding window: passed blocks are given back."""

    def __init__(
        self,
        spec: Any,
        index: int,
        pool: BlockPool,
        *,
        drop_last: bool,
        max_blocks: int,
    ) -> None:
        super().__init__(spec, index, pool, drop_last=drop_last)
        self.window = spec.sliding_window
        self.max_blocks = max_blocks
        self._kept_tokens = (
            spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        )
        # Blocks in a row that make a hit.
        self._run = (
            ceil_div(spec.sliding_window - 1, self.block_size) + drop_last
        )

    def passed_tokens(self, num_tokens: int) -> int:
        """Tokens at the front that none at or past num_tokens needs."""
        return max(0, num_tokens - self._kept_tokens)

    def reachable(self, num_blocks: int) -> list[bool] | None:
        """Which of some blocks a lookup may return; None: all."""
        return None if self._run else [False] * num_blocks

    def find(
        self, hashes: Sequence[bytes], limit: int, groups: list[int]
    ) -> list[list[int]]:
        """The longest prefix whose last window is cached, for each group.

        Blocks before the window are NULL.
        """
        run = 0
        found: list[list[int]] = [[NULL] * limit for _ in groups]
        for i in range(limit - 1, -1, -1):
            blocks = self._core.find(hashes[i], groups)
            if blocks is None:
                run = 0
                continue
            run += 1
            for ids, block in zip(found, blocks, strict=True):
                ids[i] = block
            if run >= self._run:
                return [ids[: i + run - self.drop_last] for ids in found]
        # Too few for a window, but from the first on.
        return [ids[: max(run - self.drop_last, 0)] for ids in found]


def make_groups(
    config: Any,
    pool: BlockPool,
    *,
    max_in_flight_tokens: int,
    max_model_len: int,
    use_eagle: bool,
) -> list[Group]:
    """The groups of a KV cache config.

    Raises:
      UnsupportedError: for what is not here.
    """
    flagged = [
        getattr(group, "is_eagle_group", False)
        for group in config.kv_cache_groups
    ]
    if use_eagle and not any(flagged):
        flagged = [True] * len(flagged)
    if any(flagged) and len(flagged) > 1 and pool.enable_caching:
        raise UnsupportedError(
            "use_eagle cannot be honoured with several kv_cache_groups and "
            "enable_caching. Use one group, or pass enable_caching=False."
        )
    groups: list[Group] = []
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        _check(group, spec, index)
        drop_last = bool(flagged[index])
        if _KINDS[type(spec).__name__] == "sliding_window":
            cap = spec.max_admission_blocks_per_request(
                max_in_flight_tokens=max_in_flight_tokens,
                max_model_len=max_model_len,
            )
            groups.append(
                WindowGroup(
                    spec, index, pool, drop_last=drop_last, max_blocks=cap
                )
            )
        else:
            groups.append(Group(spec, index, pool, drop_last=drop_last))
    return groups


def _check(group: Any, spec: Any, index: int) -> None:
    where = f"kv_cache_groups[{index}]"
    kind = type(spec).__name__
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{where}.kv_cache_spec is a {kind}; only "
            f"{', '.join(_KINDS)} can be managed here. Use vLLM's own manager."
        )
    if getattr(spec, "prefix_replay_tokens", 0):
        raise UnsupportedError(
            f"{where}.kv_cache_spec.prefix_replay_tokens="
            f"{spec.prefix_replay_tokens} cannot be honoured: it must be 0."
        )
    role = getattr(group, "role", None)
    if getattr(role, "name", "DEFAULT") != "DEFAULT" or getattr(
        group, "host_resident", False
    ):
        raise UnsupportedError(
            f"{where} has role={role} or is resident on the host, which "
            "cannot be honoured. Use vLLM's own manager."
        )
    if getattr(spec, "sliding_window", None) == 0 or spec.block_size < 1:
        raise PagemillError(
            f"{where}.kv_cache_spec must have block_size >= 1 and "
            "sliding_window >= 1 or None."
        )
