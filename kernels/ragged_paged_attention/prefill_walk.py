"""Which blocks the prefill kernel computes, and their way into VMEM.

Two walkers pass over the same blocks in the same order: tile by tile, in a
tile its sequences, in a sequence the blocks of keys that the tile's queries
see. The fetching one is a block ahead and crosses from tile to tile, so that a
tile never starts by waiting.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common import masking
from pagemill.kernels.ragged_paged_attention.prefill_state import Refs, Static

# Words of Refs.walk. The fetching walker: tile, sequence, next block and the
# end of the sequence's blocks; blocks fetched; pages on their way, by half.
# The computing one: blocks computed.
_TILE, _SEQ, _BLOCK, _END, _FETCHED, _COMPUTED, _PAGES = range(7)
WORDS = _PAGES + 2


@dataclasses.dataclass(frozen=True)
class Span:
    """What a tile sees of a sequence; i32 scalars."""

    offset: Any  # position of a query minus its token
    token_begin: Any  # the sequence's tokens
    token_end: Any
    kv_len: Any
    begin: Any  # keys that any query of the tile sees; none: end <= begin
    end: Any
    all_begin: Any  # keys that all its queries in the tile see
    all_end: Any
    alone: Any  # bool: no other sequence's live tokens in the tile
    active: Any  # bool: not left to another kernel

    def blocks(self, keys: int) -> tuple[Any, Any]:
        """Blocks [first, end)."""
        first = lax.div(self.begin, jnp.int32(keys))
        some = self.active & (self.begin < self.end)
        return first, jnp.where(some, _ceil_div(self.end, keys), first)

    def interior(self, keys: int) -> tuple[Any, Any]:
        """Blocks [low, high) that all rows of the tile see whole."""
        low = _ceil_div(self.all_begin, keys)
        high = lax.div(self.all_end, jnp.int32(keys))
        return low, jnp.where(self.alone, high, low)


def span(static: Static, r: Refs, tile: Any, seq: Any) -> Span:
    """What a tile sees of a sequence."""
    shape = static.shape
    tile_begin = tile * shape.queries
    tile_end = jnp.minimum(tile_begin + shape.queries, num_tokens(r))
    token_begin, token_end = r.cu_q_lens[seq], r.cu_q_lens[seq + 1]
    kv_len = r.kv_lens[seq]
    offset = kv_len - token_end
    first = jnp.maximum(tile_begin, token_begin)
    last = jnp.minimum(tile_end, token_end) - 1
    tree = static.tree_words > 0
    bounds = functools.partial(
        masking.bounds, kv_len=kv_len, params=static.params, tree=tree
    )
    begin, all_end = bounds(first + offset)
    all_begin, end = bounds(last + offset)
    if tree:
        all_end = jnp.minimum(all_end, jnp.maximum(token_begin + offset, 0))
    return Span(
        offset=offset,
        token_begin=token_begin,
        token_end=token_end,
        kv_len=kv_len,
        begin=jnp.minimum(begin, end),
        end=end,
        all_begin=all_begin,
        all_end=all_end,
        alone=(token_begin <= tile_begin) & (token_end >= tile_end),
        active=(token_end - token_begin >= max(static.min_q_len, 1))
        & (first <= last),
    )


def num_tokens(r: Refs) -> Any:
    """Live query tokens."""
    return r.cu_q_lens[jnp.clip(r.num_seqs[0], 0, r.kv_lens.shape[0])]


def _ceil_div(x: Any, by: int) -> Any:
    return lax.div(x + jnp.int32(by - 1), jnp.int32(by))  # int32 in x64 mode


def start(static: Static, r: Refs, tile: Any) -> None:
    """Both walkers to a tile's first block, whose copies start."""
    r.walk[_FETCHED] = jnp.int32(0)
    r.walk[_COMPUTED] = jnp.int32(0)
    _seek(static, r, tile, r.first_seqs[tile])
    fetch(static, r)


def restart(static: Static, r: Refs, tile: Any) -> None:
    """Back to a tile's first block, wherever the fetching walker is."""
    if static.table.streamed:

        @pl.when(r.walk[_TILE] < static.shape.tiles)
        def _expected() -> None:
            static.table.wait(r, r.walk[_FETCHED] & 1)

    @pl.when(r.walk[_FETCHED] > r.walk[_COMPUTED])
    def _drop() -> None:
        wait(static, r)
        done(r)

    start(static, r, tile)


def _seek(static: Static, r: Refs, tile: Any, seq: Any) -> None:
    """The fetching walker to the first block from a sequence on."""
    shape = static.shape
    cores, tiles = shape.cores, shape.tiles

    def look(tile: Any, seq: Any) -> tuple[Any, Any]:
        """Blocks of a sequence in a tile; none past the tile's last one."""
        here = jnp.minimum(tile, tiles - 1)
        valid = (tile < tiles) & (seq < r.end_seqs[here])
        safe = jnp.where(valid, seq, 0)
        first, end = span(static, r, here, safe).blocks(shape.keys)
        return first, jnp.where(valid, end, first)

    def step(state: Any) -> Any:
        tile, seq, _, _ = state
        over = seq + 1 >= r.end_seqs[tile]
        tile = jnp.where(over, tile + cores, tile)
        first = r.first_seqs[jnp.minimum(tile, tiles - 1)]
        seq = jnp.where(over, first, seq + 1)
        return (tile, seq, *look(tile, seq))

    tile, seq, block, end = lax.while_loop(
        lambda s: (s[0] < tiles) & (s[2] >= s[3]),
        step,
        (tile, seq, *look(tile, seq)),
    )
    r.walk[_TILE], r.walk[_SEQ] = tile, seq
    r.walk[_BLOCK], r.walk[_END] = block, end
    if static.table.streamed:
        pl.when(tile < tiles)(lambda: _expect(static, r))


def _entry(static: Static, r: Refs) -> Any:
    """Of page_indices: the first of the fetching walker's block."""
    shape = static.shape
    block = r.walk[_BLOCK] * shape.block_pages
    return r.walk[_SEQ] * shape.pages_per_seq + block


def _expect(static: Static, r: Refs) -> None:
    """The table's window of the fetching walker's block on its way."""
    static.table.start(r, r.walk[_FETCHED] & 1, _entry(static, r))


def _copy(static: Static, r: Refs, half: Any, i: Any, page: Any) -> Any:
    return pltpu.make_async_copy(
        r.kv_pages.at[page],
        static.block.page(r.kv, half, i),
        r.arrived.at[half],
    )


def fetch(static: Static, r: Refs) -> None:
    """Starts the copies of the fetching walker's block, and moves it on."""

    @pl.when(r.walk[_TILE] < static.shape.tiles)
    def _some() -> None:
        tile, seq, block = r.walk[_TILE], r.walk[_SEQ], r.walk[_BLOCK]
        half = r.walk[_FETCHED] & 1
        _start_copies(static, r, tile, seq, block, half)
        r.walk[_FETCHED] = r.walk[_FETCHED] + 1
        r.walk[_BLOCK] = block + 1

        over = block + 1 >= r.walk[_END]
        if static.table.streamed:
            pl.when(jnp.logical_not(over))(lambda: _expect(static, r))
        pl.when(over)(lambda: _next(static, r))


def _next(static: Static, r: Refs) -> None:
    """The fetching walker to the next sequence with blocks."""
    tile, seq = r.walk[_TILE], r.walk[_SEQ]
    over = seq + 1 >= r.end_seqs[tile]
    following = jnp.where(over, tile + static.shape.cores, tile)
    safe = jnp.minimum(following, static.shape.tiles - 1)
    first = jnp.where(over, r.first_seqs[safe], seq + 1)
    _seek(static, r, following, first)


def _start_copies(
    static: Static, r: Refs, tile: Any, seq: Any, block: Any, half: Any
) -> None:
    """Of the pages that the tile's queries see, in their places."""
    shape = static.shape
    seen = span(static, r, tile, seq)
    first_slot = block * shape.block_pages
    low = lax.div(seen.begin, jnp.int32(shape.page_size)) - first_slot
    high = _ceil_div(seen.end, shape.page_size) - first_slot
    low = jnp.clip(low, 0, shape.block_pages)
    high = jnp.clip(high, 0, shape.block_pages)
    entry = _entry(static, r)
    static.table.wait(r, half)

    def body(i: Any, carry: Any) -> Any:
        page = static.table.page(r, half, entry, i)
        _copy(static, r, half, i, page).start()
        return carry

    lax.fori_loop(low, high, body, jnp.int32(0))
    r.walk[_PAGES + half] = high - low


def fetch_following(static: Static, r: Refs, seen: Span) -> None:
    """As `fetch`, for a block of the same sequence, as straight-line code.

    The scheduler hides it behind the work of the block before. The block comes
    whole: past the last page that the tile's queries see comes that page again.
    """
    shape = static.shape
    block, half = r.walk[_BLOCK], r.walk[_FETCHED] & 1
    last_slot = _ceil_div(seen.end, shape.page_size) - 1
    last = last_slot - block * shape.block_pages
    entry = _entry(static, r)
    static.table.wait(r, half)
    for i in range(shape.block_pages):
        page = static.table.page(r, half, entry, jnp.minimum(i, last))
        _copy(static, r, half, i, page).start()
    r.walk[_PAGES + half] = jnp.int32(shape.block_pages)
    r.walk[_FETCHED] = r.walk[_FETCHED] + 1
    r.walk[_BLOCK] = block + 1
    if static.table.streamed:
        more = block + 1 < r.walk[_END]
        pl.when(more)(lambda: _expect(static, r))


def fetch_next_sequence(static: Static, r: Refs) -> None:
    """The fetching walker on, where `fetch_following` left it at an end."""

    @pl.when(r.walk[_BLOCK] >= r.walk[_END])
    def _over() -> None:
        _next(static, r)


def wait(static: Static, r: Refs) -> Any:
    """Waits for the computing walker's block; returns its half."""
    half = r.walk[_COMPUTED] & 1
    pages = r.walk[_PAGES + half]
    whole = pages == static.shape.block_pages

    @pl.when(whole)
    def _at_once() -> None:
        # A copy that is never started: its size is what matters.
        block = r.kv.at[half]
        pltpu.make_async_copy(block, block, r.arrived.at[half]).wait()

    def body(_: Any, carry: Any) -> Any:
        _copy(static, r, half, 0, 0).wait()
        return carry

    lax.fori_loop(jnp.int32(0), jnp.where(whole, 0, pages), body, jnp.int32(0))
    return half


def done(r: Refs) -> None:
    """The computing walker's block is used up."""
    r.walk[_COMPUTED] = r.walk[_COMPUTED] + 1
