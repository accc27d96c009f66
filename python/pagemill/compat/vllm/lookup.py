"""The longest cached prefix that all groups have."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.compat.vllm.groups import Group


class Lookup:
    """Looks prefixes up in all groups.

    Args:
      groups: of one block size.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._num_groups = len(groups)
        # Groups of equal specs are looked up together.
        self._parts: list[tuple[Group, list[int]]] = []
        for group in groups:
            for first, members in self._parts:
                if first.spec == group.spec:
                    members.append(group.index)
                    break
            else:
                self._parts.append((group, [group.index]))
        # Full attention is quick to say how much there can be.
        self._parts.sort(key=lambda part: part[0].window is not None)

    def find(
        self, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[int], ...], int, int]:
        """The block ids of each group, NULL where a window has passed.

        Args:
          hashes: a request's block hashes.
          max_tokens: how long the prefix may be.

        Returns:
          The ids; how many tokens they are; and how many the first to be
          looked up had found.
        """
        size = self._parts[0][0].block_size
        limit = min(max_tokens // size, len(hashes))
        found: dict[int, list[int]] = {}
        longest: int | None = None
        # What one group lacks may cost another the blocks of its last window.
        before = -1
        while limit != before:
            before = limit
            for group, members in self._parts:
                # Any part of a prefix of full attention is one.
                if group.window is not None or group.index not in found:
                    ids = group.find(hashes, limit, members)
                    found.update(zip(members, ids, strict=True))
                limit = min(limit, len(found[group.index]))
                longest = limit if longest is None else longest
            if len(self._parts) == 1:
                break
        ids = [found[group][:limit] for group in range(self._num_groups)]
        return tuple(ids), limit * size, (longest or 0) * size
