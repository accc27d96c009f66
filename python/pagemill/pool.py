"""PagePool: who holds which page of the KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as Collection
from typing import Any, Literal, NamedTuple

import numpy as np

from pagemill import _core
from pagemill.batch import as_int32
from pagemill.errors import PagemillError

Int32Array = np.ndarray[Any, np.dtype[np.int32]]

# In the order of the core's enum.
PAGE_STATES = (
    "free",
    "reserved",
    "written",
    "published",
    "evictable",
    "fenced",
)


class PageEvent(NamedTuple):
    """A change of the prefix cache.

    Attributes:
      kind: a page became findable, or was taken for something else.
      page: its id.
      key: 16 bytes that stand for all tokens up to the page's end. Whoever
        knows a key can test guesses of the tokens that follow: keep it inside.
    """

    kind: Literal["published", "evicted"]
    page: int
    key: bytes


@dataclasses.dataclass(frozen=True)
class PoolStats:
    """A pool at one moment; counts of pages unless said.

    Attributes:
      free: held by nobody, with nothing worth keeping.
      reserved: held by steps that have not committed.
      written: held by one sequence (or its forks).
      published: full, read-only and found by their content.
      evictable: published, held by nobody.
      fenced: held by nobody but steps in flight.
      sequences: open ones.
      steps_in_flight: planned and not yet retired.
      held_slots: token slots in the pages that sequences list.
      held_tokens: of these, how many hold a token.
      looked_up_tokens: tokens that sequences were opened or resumed with.
      hit_tokens: of these, how many were found in the cache.
      evictions: pages taken from the cache so far.
    """

    free: int
    reserved: int
    written: int
    published: int
    evictable: int
    fenced: int
    sequences: int
    steps_in_flight: int
    held_slots: int
    held_tokens: int
    looked_up_tokens: int
    hit_tokens: int
    evictions: int

    @property
    def in_use(self) -> int:
        """Pages that cannot be handed out now."""
        return self.reserved + self.written + self.published + self.fenced

    @property
    def hit_rate(self) -> float:
        """Share of looked-up tokens that were found; 0 without any."""
        return self.hit_tokens / max(self.looked_up_tokens, 1)

    @property
    def fragmentation(self) -> float:
        """Share of token slots in held pages that hold no token."""
        return (
            1 - self.held_tokens / self.held_slots if self.held_slots else 0.0
        )


class Sequence:
    """A request's place in a pool; made by :meth:`PagePool.open`.

    Attributes:
      pool: the pool it belongs to.
      handle: its id in the pool; never used again once it is closed.
      num_prompt_tokens: tokens it was opened with.
      num_cached_tokens: of those, how many were in the cache already: its
        ``length`` starts there.
    """

    __slots__ = ("handle", "num_cached_tokens", "num_prompt_tokens", "pool")

    def __init__(
        self,
        pool: PagePool,
        handle: int,
        num_prompt_tokens: int,
        num_cached_tokens: int = 0,
    ) -> None:
        self.pool = pool
        self.handle = handle
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens

    @property
    def length(self) -> int:
        """Tokens whose KV has a place: those cached or planned so far."""
        return self.pool._core.length(self.handle)

    @property
    def committed_length(self) -> int:
        """Of these, the tokens of steps that have committed."""
        return self.pool._core.committed_length(self.handle)

    @property
    def pages(self) -> Int32Array:
        """i32[ceil(length / page_size)]: its page ids in order, a copy."""
        return self.pages_of(0)

    def pages_of(self, group: int) -> Int32Array:
        """Its page ids in a KV group; -1 where a sliding window has passed."""
        return self.pool._core.pages(self.handle, as_count("group", group))

    def __repr__(self) -> str:
        """Tells a closed sequence from a live one."""
        try:
            state = f"length={self.length}"
        except PagemillError:
            state = "closed"
        slot, generation = self.handle & 0xFFFFFFFF, self.handle >> 32
        return f"Sequence({slot}, generation={generation}, {state})"


class PagePool:
    """Reference-counted pages of one KV cache, with prefix reuse.

    A failed call changes nothing. Safe to use from several threads.

    Pages of full prompts' prefixes are found by a chained SHA-256 over their
    token ids, shared, and evicted when pages run out: least recently released
    first, the end of a chain before its beginning.

    Args:
      total_num_pages: pages in the cache.
      page_size: tokens per page.
      sliding_windows: one entry for each group of layers with the same needs:
        the number of keys that a query sees, or None for all. Groups draw from
        the same pages; those with a window give back what it has passed.
      prefix_cache: whether pages are shared by content.
      secret: what the keys of pages are salted with; drawn at random unless
        given. Pools with the same secret give the same keys.
      max_events: how many events :meth:`take_events` can hold back.

    Raises:
      PagemillError: sizes out of range.
    """

    def __init__(
        self,
        total_num_pages: int,
        page_size: int,
        *,
        sliding_windows: Collection[int | None] = (None,),
        prefix_cache: bool = True,
        secret: bytes | None = None,
        max_events: int = 0,
    ) -> None:
        if secret is not None and (not isinstance(secret, bytes) or not secret):
            raise PagemillError(
                "secret must be bytes, and not empty. Pass 32 random bytes, "
                "or None to have them drawn."
            )
        if not isinstance(sliding_windows, Iterable):
            raise PagemillError(
                f"sliding_windows={sliding_windows!r} must be a sequence. Pass "
                "one window, or None, for each KV group."
            )
        self.sliding_windows = tuple(sliding_windows)
        max_events = as_count("max_events", max_events)
        if max_events < 0:
            raise PagemillError(
                f"max_events={max_events} must be at least 0. Pass 0 for none."
            )
        self._core = _core.PagePool(
            as_count("total_num_pages", total_num_pages),
            as_count("page_size", page_size),
            [_window(i, w) for i, w in enumerate(self.sliding_windows)],
            bool(prefix_cache),
            secret or b"",
            max_events,
        )

    def open(self, tokens: Any = (), *, salt: str | bytes = b"") -> Sequence:
        """A new sequence; what the cache has of its prompt is held at once.

        Its ``length`` is ``num_cached_tokens``: plan the tokens that follow.
        At least one token is always left to compute, for its logits.

        Args:
          tokens: the prompt's token ids, a one-dimensional array of integers.
          salt: prefixes are shared under the same salt only: name the tenant
            or adapter.

        Raises:
          PagemillError: tokens that are not token ids.
        """
        array = _token_ids(tokens)
        handle, cached = self._core.open(array, _salt(salt))
        return Sequence(self, handle, int(array.size), cached)

    def probe(self, tokens: Any, *, salt: str | bytes = b"") -> int:
        """How many tokens :meth:`open` would find; holds and counts nothing."""
        return self._core.probe(_token_ids(tokens), _salt(salt))

    def extend(self, seq: Sequence, tokens: Any) -> None:
        """Tells the ids of the tokens that follow the known ones.

        With them the pages of generated tokens can be reused too. The known
        ones are the prompt's, and those told before.

        Raises:
          PagemillError: tokens that are not token ids, or a closed or foreign
            sequence.
        """
        self._core.extend(self._own(seq), _token_ids(tokens))

    def fork(self, seq: Sequence) -> Sequence:
        """A second sequence over the same tokens.

        Full pages are shared. A partly filled last page is not: the fork gets
        a page of its own, and :meth:`take_page_copies` then holds the copy to
        make.

        Raises:
          CapacityError: no page is left for the partly filled last one.
          PagemillError: a closed or foreign sequence.
        """
        handle = self._core.fork(self._own(seq))
        return Sequence(
            self, handle, seq.num_prompt_tokens, seq.num_cached_tokens
        )

    def truncate(self, seq: Sequence, length: int) -> None:
        """Forgets the tokens at and past ``length``; frees their pages.

        Where the new last page is shared and partly filled, the sequence gets
        a page of its own, as in :meth:`fork`.

        Raises:
          PagemillError: a length outside [0, seq.length], or a closed or
            foreign sequence.
          CapacityError: no page is left for the copy.
        """
        self._core.truncate(self._own(seq), as_count("length", length))

    def close(self, seq: Sequence) -> None:
        """Gives the sequence's pages back; it cannot be used afterwards.

        Raises:
          PagemillError: it was closed before, or belongs to another pool.
        """
        self._core.close(self._own(seq))

    def preempt(self, seq: Sequence) -> None:
        """Gives all of the sequence's pages back; its known tokens are kept.

        Its ``length`` becomes 0. :meth:`resume` finds again what is still
        cached; plan the rest once more.

        Raises:
          PagemillError: a closed, swapped out or foreign sequence.
        """
        self._core.preempt(self._own(seq))

    def resume(self, seq: Sequence) -> int:
        """Looks a preempted sequence's known tokens up; the length found.

        Raises:
          PagemillError: a sequence that holds tokens, or a closed, swapped out
            or foreign one.
        """
        return self._core.resume(self._own(seq))

    def begin_swap_out(self, seq: Sequence) -> Int32Array:
        """The pages to copy elsewhere; the sequence can't be planned meanwhile.

        Returns:
          i32[slots, groups]: page ids, -1 where a sliding window has passed.

        Raises:
          PagemillError: uncommitted tokens, an untaken page copy, or a closed,
            swapped out or foreign sequence.
        """
        return self._core.begin_swap_out(self._own(seq))

    def end_swap_out(self, seq: Sequence) -> None:
        """The copy is done: gives the pages back and keeps the length.

        Raises:
          PagemillError: a sequence that is not being swapped out.
        """
        self._core.end_swap_out(self._own(seq))

    def swap_in(self, seq: Sequence) -> Int32Array:
        """Gives a swapped out sequence pages again.

        Returns:
          i32[slots, groups]: the pages to copy back into before it is planned;
          -1 where nothing is to be copied, since the page was still cached or
          a sliding window has passed.

        Raises:
          CapacityError: too few pages; the sequence stays swapped out.
          PagemillError: a sequence that is not swapped out.
        """
        return self._core.swap_in(self._own(seq))

    def take_page_copies(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """i32[n, 2]: (source, target) pages to copy before the next plan.

        Apply them with :func:`pagemill.copy_pages`. A plan that would write
        behind an untaken copy is refused.
        """
        return self._core.take_page_copies()

    def reference_count(self, page: int) -> int:
        """How many sequences hold a page.

        Raises:
          PagemillError: a page outside [0, total_num_pages).
        """
        return self._core.reference_count(as_count("page", page))

    def page_state(self, page: int) -> str:
        """One of PAGE_STATES, as :class:`PoolStats` describes them.

        Raises:
          PagemillError: a page outside [0, total_num_pages).
        """
        return PAGE_STATES[self._core.state(as_count("page", page))]

    def stats(self) -> PoolStats:
        """Counts of the moment, in O(sequences)."""
        return PoolStats(**self._core.stats())

    def take_events(self) -> tuple[list[PageEvent], int]:
        """The events since the last call, and how many found no room."""
        events, dropped = self._core.take_events()
        kinds: tuple[Literal["published"], Literal["evicted"]] = (
            "published",
            "evicted",
        )
        return [
            PageEvent(kinds[kind], page, key) for kind, page, key in events
        ], dropped

    def clear_cache(self) -> int:
        """Forgets the cached pages that nobody holds; how many they were."""
        return self._core.clear_cache()

    @property
    def total_num_pages(self) -> int:
        """Pages in the cache."""
        return self._core.total_num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._core.page_size

    @property
    def num_groups(self) -> int:
        """KV groups: entries of sliding_windows."""
        return self._core.num_groups

    @property
    def num_free_pages(self) -> int:
        """Pages that hold nothing; cached ones come on top."""
        return self._core.num_free_pages

    @property
    def num_available_pages(self) -> int:
        """Pages that a plan can take: free, or cached and held by nobody."""
        return self._core.num_available_pages

    @property
    def num_sequences(self) -> int:
        """Sequences opened and not yet closed."""
        return self._core.num_sequences

    def audit(self) -> None:
        """Counts everything anew, in O(total_num_pages).

        Raises:
          RuntimeError: an invariant of the pool is broken: a bug in Pagemill.
        """
        self._core.audit()

    def __repr__(self) -> str:
        """Says how full the pool is."""
        return (
            f"PagePool(total_num_pages={self.total_num_pages}, "
            f"page_size={self.page_size}, "
            f"num_free_pages={self.num_free_pages}, "
            f"num_sequences={self.num_sequences})"
        )

    def _own(self, seq: Sequence) -> int:
        if not isinstance(seq, Sequence):
            raise PagemillError(
                f"seq is a {type(seq).__name__}, not a Sequence. "
                "Pass what PagePool.open returned."
            )
        if seq.pool is not self:
            raise PagemillError(
                f"{seq!r} belongs to another pool, {seq.pool!r}. "
                "Use the pool that opened it."
            )
        return seq.handle


def as_count(name: str, value: Any) -> int:
    """An int of anything with ``__index__`` but bool; int64 at most.

    Raises:
      PagemillError: another type or an integer beyond int64.
    """
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise PagemillError(
            f"{name}={value!r} must be an integer. Pass an int."
        )
    count = value.__index__()
    if not -(2**63) <= count < 2**63:
        raise PagemillError(f"{name}={count} does not fit int64.")
    return int(count)


def _token_ids(tokens: Any) -> Int32Array:
    array = np.asarray(as_int32("tokens", tokens))
    if array.ndim != 1:
        raise PagemillError(
            f"tokens has shape {array.shape} and dtype {array.dtype}; it must "
            "be a one-dimensional array of integers. Pass the prompt's token "
            "ids."
        )
    return array


def _salt(salt: str | bytes) -> bytes:
    if isinstance(salt, str):
        return salt.encode()
    if not isinstance(salt, bytes):
        raise PagemillError(
            f"salt is a {type(salt).__name__}; it must be str or bytes. "
            "Name the tenant or adapter."
        )
    return salt


def _window(group: int, window: int | None) -> int:
    if window is None:
        return 0
    count = as_count(f"sliding_windows[{group}]", window)
    return count if count > 0 else -1  # 0 would mean none to the core
