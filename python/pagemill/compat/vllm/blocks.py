"""Blocks as objects: made when somebody looks at one, they hold an id only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagemill.compat.vllm.block_pool import BlockPool

NULL = 0


class KVCacheBlock:
    """A block of a pool; equal to every other object for the same block."""

    __slots__ = ("block_id", "pool")

    def __init__(self, block_id: int, pool: BlockPool) -> None:
        self.block_id = block_id
        self.pool = pool

    @property
    def ref_cnt(self) -> int:
        """How many hold it; always 0 for the null block."""
        return self.pool.core.references(self.block_id)

    @property
    def block_hash(self) -> bytes | None:
        """The hash it is cached under and its group's id in 4 bytes."""
        return self.pool.core.hash_of(self.block_id)

    @property
    def block_hash_num_tokens(self) -> int | None:
        """How many tokens of a prompt its hash stands for."""
        return self.pool.core.num_tokens_of(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether it stands for no block."""
        return self.block_id == NULL

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, KVCacheBlock)
            and self.block_id == other.block_id
            and self.pool is other.pool
        )

    def __hash__(self) -> int:
        return hash((self.block_id, id(self.pool)))

    def __repr__(self) -> str:
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"block_hash={self.block_hash!r})"
        )


class KVCacheBlocks:
    """The blocks of each KV cache group, in the order of their tokens.

    Attributes:
      ids: their ids; not to be changed.
      pool: whose they are; None if there are none.
    """

    __slots__ = ("ids", "pool")

    ids: tuple[Sequence[int], ...]
    pool: BlockPool | None

    def __init__(self, blocks: tuple[Sequence[KVCacheBlock], ...]) -> None:
        self.ids = tuple([b.block_id for b in group] for group in blocks)
        self.pool = next((b.pool for group in blocks for b in group), None)

    @classmethod
    def of_ids(
        cls, pool: BlockPool, ids: tuple[Sequence[int], ...]
    ) -> KVCacheBlocks:
        """From ids, which are kept as they are."""
        made = cls.__new__(cls)
        made.ids = ids
        made.pool = pool
        return made

    @property
    def blocks(self) -> tuple[Sequence[KVCacheBlock], ...]:
        """The blocks as objects, made anew; () for a group that has none."""
        pool = self.pool
        if pool is None:
            return ((),) * len(self.ids)
        return tuple(
            [KVCacheBlock(i, pool) for i in group] if group else ()
            for group in self.ids
        )

    def get_block_ids(
        self,
        allow_none: bool = False,
        *,
        group_ids: Sequence[int] | None = None,
    ) -> tuple[list[int], ...] | None:
        """The ids of each group, or of some groups.

        Args:
          allow_none: return None where these groups have no blocks.
          group_ids: which groups; None: all.
        """
        groups = (
            self.ids
            if group_ids is None
            else tuple(self.ids[group] for group in group_ids)
        )
        if allow_none and not any(groups):
            return None
        return tuple(map(list, groups))

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the only group's blocks that are not cached."""
        (ids,) = self.ids
        return self._unhashed(ids)

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of each group's blocks that are not cached, nulls left out."""
        return [
            [i for i in self._unhashed(ids) if i != NULL] for ids in self.ids
        ]

    def _unhashed(self, ids: Sequence[int]) -> list[int]:
        pool = self.pool
        if pool is None:
            return []
        return [i for i in ids if pool.core.hash_of(i) is None]

    def new_empty(self) -> KVCacheBlocks:
        """As many groups without blocks."""
        return KVCacheBlocks(((),) * len(self.ids))

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        joined = KVCacheBlocks(())
        joined.ids = tuple(
            [*mine, *theirs]
            for mine, theirs in zip(self.ids, other.ids, strict=True)
        )
        joined.pool = self.pool if any(self.ids) else other.pool
        return joined

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, KVCacheBlocks)
            and [*map(list, self.ids)] == [*map(list, other.ids)]
            and (self.pool is other.pool or not any(self.ids))
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"KVCacheBlocks({self.get_block_ids()})"
