"""The fetching end of the decode kernel: which pages come, and where to.

It runs `buffers - 1` blocks ahead of the computing end, over the same blocks in
the same order, and crosses from part to part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.ragged_paged_attention.decode_state import (
    FETCH_BUFFER,
    FETCH_ENTRY,
    FETCH_LEFT,
    FETCH_PART,
    Refs,
    Static,
    span_of,
)

# Copies that a loop starts per iteration; a power of two.
_UNROLL = 8


def seek(static: Static, r: Refs, part: Any) -> None:
    """Points the fetching end at the core's first live part from `part` on."""
    shape = static.shape
    parts = r.num_seqs[0] * shape.splits

    def pages(part: Any) -> Any:
        return span_of(static, r, jnp.minimum(part, shape.parts - 1)).pages

    part, left = lax.while_loop(
        lambda c: (c[0] < parts) & (c[1] <= 0),
        lambda c: (c[0] + shape.cores, pages(c[0] + shape.cores)),
        (part, pages(part)),
    )
    span = span_of(static, r, jnp.minimum(part, shape.parts - 1))
    r.state[FETCH_PART] = part
    r.state[FETCH_LEFT] = jnp.where(part < parts, left, 0)
    r.state[FETCH_ENTRY] = span.seq * shape.pages_per_seq + span.first_page
    if static.table.streamed:
        pl.when(r.state[FETCH_LEFT] > 0)(lambda: _expect(static, r))


def _expect(static: Static, r: Refs) -> None:
    """The table's window of the fetching end's block on its way."""
    static.table.start(r, r.state[FETCH_BUFFER], r.state[FETCH_ENTRY])


def _copy(static: Static, r: Refs, buffer: Any, i: Any, page: Any) -> Any:
    """The copy of a page to a block's i-th place."""
    return pltpu.make_async_copy(
        r.kv_pages.at[page],
        static.block.page(r.kv, buffer, i),
        r.arrived.at[buffer],
    )


def wait(static: Static, r: Refs, buffer: Any, count: Any) -> None:
    """Waits for `count` pages of a block, one by one.

    One wait for all would do, but the compiler's simulator does not see it:
    kernels would seem faster than HBM.
    """

    def wait(i: Any, carry: Any) -> Any:
        _copy(static, r, buffer, i, 0).wait()
        return carry

    if isinstance(count, int):
        for i in range(count):
            wait(i, None)
    else:
        lax.fori_loop(jnp.int32(0), count, wait, jnp.int32(0))


def fetch(static: Static, r: Refs) -> None:
    """Starts the copies of a block and moves the fetching end behind it."""
    shape = static.shape
    entry, buffer = r.state[FETCH_ENTRY], r.state[FETCH_BUFFER]
    count = jnp.minimum(r.state[FETCH_LEFT], shape.block_pages)

    def start(first: Any, size: int) -> None:
        for i in range(size):
            page = static.table.page(r, buffer, entry, i, after=first)
            _copy(static, r, buffer, first + i, page).start()

    def many(i: Any, carry: Any) -> Any:
        start(i * _UNROLL, _UNROLL)
        return carry

    count = jnp.maximum(count, 0)
    if static.table.streamed:
        pl.when(count > 0)(lambda: static.table.wait(r, buffer))
    groups = lax.div(count, jnp.int32(_UNROLL))
    lax.fori_loop(jnp.int32(0), groups, many, jnp.int32(0))
    done, size = groups * _UNROLL, _UNROLL // 2
    while size:
        pl.when((count & size) != 0)(functools.partial(start, done, size))
        done, size = done + (count & size), size // 2
    advance(static, r)


def fetch_later(static: Static, r: Refs) -> Callable[[], None]:
    """A whole block's copies, as straight-line code that starts them.

    What it needs of the state is read at once; advance() must follow.
    """
    buffer, entry = r.state[FETCH_BUFFER], r.state[FETCH_ENTRY]
    static.table.wait(r, buffer)

    def start() -> None:
        for i in range(static.shape.block_pages):
            page = static.table.page(r, buffer, entry, i)
            _copy(static, r, buffer, i, page).start()

    return start


def advance(static: Static, r: Refs) -> None:
    """Moves the fetching end to its next block."""
    shape = static.shape
    left = r.state[FETCH_LEFT] - shape.block_pages
    r.state[FETCH_LEFT] = left
    r.state[FETCH_ENTRY] = r.state[FETCH_ENTRY] + shape.block_pages
    buffer = r.state[FETCH_BUFFER] + 1
    r.state[FETCH_BUFFER] = jnp.where(buffer == shape.buffers, 0, buffer)

    @pl.when((left <= 0) & (left > -shape.block_pages))
    def _next() -> None:
        seek(static, r, r.state[FETCH_PART] + shape.cores)

    if static.table.streamed:
        pl.when(left > 0)(lambda: _expect(static, r))
