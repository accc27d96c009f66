"""Writing keys and values into pages of planes.

The unit is a *tile*: the sublane tile of every plane of a page that holds the
same tokens; a whole page where those do not divide it. A ring of tiles in VMEM
keeps several on their way: reads run ahead, writes are awaited where their
buffer is needed again. A tile that a run covers is not read.

Tokens come in blocks, [plane, token, lane]. A block is widened to 32 bits an
element, in which rows can be taken from any token on. Elements are integers, so
that every bit stays what it is.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from pagemill.kernels.common.chip import chip
from pagemill.kernels.ragged_paged_attention.write_runs import (
    padded,
    run_lengths,
)

_SUBLANES, _LANES = 8, 128
_WORD_BYTES = 4
# Tokens of a block: at least the rows of a tile of any type.
_LEAST_TOKENS, _MOST_TOKENS = 32, 512
_WIDE_BYTES = 2 * 2**20
# Tiles on their way.
_LEAST_TILES, _MOST_TILES = 2, 16
_RING_BYTES = 4 * 2**20
_NO_TILE = -1


@dataclasses.dataclass(frozen=True)
class _Shape:
    planes: int  # of K, then of V
    page_size: int
    lanes: int
    dtype: np.dtype[Any]
    tokens: int  # of a block

    @property
    def integer(self) -> np.dtype[Any]:
        """As wide as the elements."""
        return np.dtype(f"int{8 * self.dtype.itemsize}")

    @property
    def rows(self) -> int:
        """Tokens of a tile."""
        rows = _SUBLANES * _WORD_BYTES // self.dtype.itemsize
        while rows > _SUBLANES and self.page_size % rows:
            rows //= 2
        return rows if self.page_size % rows == 0 else self.page_size

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.planes, self.rows, self.lanes

    @property
    def tiles(self) -> int:
        """Of the ring; a power of two."""
        size = int(np.prod(self.tile)) * self.dtype.itemsize
        tiles = _MOST_TILES
        while tiles > _LEAST_TILES and tiles * size > _RING_BYTES:
            tiles //= 2
        return tiles

    @property
    def chunks(self) -> list[slice]:
        """The lanes, a register's at a time."""
        return [
            slice(lane, lane + _LANES) for lane in range(0, self.lanes, _LANES)
        ]

    @property
    def margin(self) -> int:
        """Rows before and behind the tokens, that a tile may reach into."""
        return -(-self.rows // _SUBLANES) * _SUBLANES


def write_planes(
    kv_pages: jax.Array, kv: jax.Array, slots: jax.Array, *, interpret: Any
) -> jax.Array:
    """Writes tokens into their slots.

    Args:
      kv_pages: [N, 2, Hkv, page_size, lanes].
      kv: [T, 2, Hkv, lanes], integers as wide as kv_pages' elements.
      slots: i32[T], -1 for dead tokens.
      interpret: False, or pltpu.InterpretParams to run on a CPU.

    Returns:
      The pages.
    """
    pages, _, heads, page_size, lanes = kv_pages.shape
    shape = _Shape(
        planes=2 * heads,
        page_size=page_size,
        lanes=lanes,
        dtype=np.dtype(kv_pages.dtype),
        tokens=_fit_tokens(slots.shape[0], 2 * heads * lanes),
    )
    slots = padded(slots, shape.tokens)
    kv = kv.reshape(-1, shape.planes, lanes).transpose(1, 0, 2)
    kv = jnp.pad(kv, ((0, 0), (0, slots.shape[0] - kv.shape[1]), (0, 0)))
    flat = kv_pages.reshape(pages, shape.planes, page_size, lanes)
    lengths = run_lengths(slots, shape.tokens, shape.rows)
    call = _call(shape, flat, slots.shape[0], interpret)
    slots, lengths = (x.reshape(-1, 1, shape.tokens) for x in (slots, lengths))
    written: jax.Array = call(slots, lengths, kv, flat)
    return written.reshape(kv_pages.shape)


def _fit_tokens(tokens: int, elements: int) -> int:
    """A power of two, as far as there are so many."""
    fit = _LEAST_TOKENS
    while fit < min(tokens, _MOST_TOKENS) and (
        2 * fit * elements * _WORD_BYTES <= _WIDE_BYTES
    ):
        fit *= 2
    return fit


def _call(shape: _Shape, flat: Any, tokens: int, interpret: Any) -> Any:
    in_smem = pl.BlockSpec(
        (None, 1, shape.tokens),
        lambda i: (i, 0, 0),
        memory_space=pltpu.SMEM,
    )
    wide_rows = shape.tokens + 2 * shape.margin
    return pl.pallas_call(
        functools.partial(_kernel, shape),
        grid=(tokens // shape.tokens,),
        in_specs=[
            in_smem,
            in_smem,
            pl.BlockSpec(
                (shape.planes, shape.tokens, shape.lanes),
                lambda i: (0, i, 0),
            ),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        scratch_shapes=[
            pltpu.VMEM(
                (len(shape.chunks), shape.planes, wide_rows, _LANES), jnp.int32
            ),
            pltpu.VMEM((shape.tiles, *shape.tile), shape.dtype),
            pltpu.SMEM((shape.tiles + 1,), jnp.int32),
            pltpu.SemaphoreType.DMA((shape.tiles,)),
            pltpu.SemaphoreType.DMA((shape.tiles,)),
        ],
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=chip().vmem_limit,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name="write_kv_planes",
    )


@dataclasses.dataclass(frozen=True)
class _Refs:
    slots: Any  # i32[1, tokens] SMEM
    lengths: Any  # i32[1, tokens] SMEM, see run_lengths
    kv: Any  # [planes, tokens, lanes]
    _: Any  # the pages, before
    pages: Any  # [N, planes, page_size, lanes] HBM
    wide: Any  # i32[chunks, planes, margin + tokens + margin, LANES]
    ring: Any  # [tiles, planes, rows, lanes]
    state: Any  # i32[tiles + 1] SMEM: a buffer's tile; runs so far
    read: Any  # DMA semaphore per buffer
    written: Any  # DMA semaphore per buffer


@dataclasses.dataclass(frozen=True)
class _Run:
    token: Any  # the first, in its block
    length: Any
    slot: Any
    buffer: Any


def _kernel(shape: _Shape, *refs: Any) -> None:
    r = _Refs(*refs)
    zero = jnp.int32(0)

    @pl.when(pl.program_id(0) == 0)
    def _start() -> None:
        r.state[shape.tiles] = zero
        for buffer in range(shape.tiles):
            r.state[buffer] = jnp.int32(_NO_TILE)

    for chunk, lanes in enumerate(shape.chunks):
        wide = r.kv[:, :, lanes].astype(jnp.int32)
        r.wide[chunk, :, pl.ds(shape.margin, shape.tokens)] = wide

    def body(carry: Any) -> Any:
        ahead, fetched, token, runs = carry
        ahead, fetched = _fetch_ahead(shape, r, ahead, fetched, runs)
        run = _run(shape, r, token, runs)
        _change(shape, r, run)
        return ahead, fetched, _next_live(shape, r, run), runs + 1

    first = _from(shape, r, zero)
    begun = r.state[shape.tiles]
    carry = (first, begun, first, begun)
    *_, runs = lax.while_loop(lambda c: c[2] < shape.tokens, body, carry)
    r.state[shape.tiles] = runs

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _finish() -> None:
        _await_all(shape, r)


def _from(shape: _Shape, r: _Refs, token: Any) -> Any:
    """The first live token from one that begins a run on."""
    safe = jnp.minimum(token, shape.tokens - 1)
    dead = (token < shape.tokens) & (r.slots[0, safe] < 0)
    # A run of dead tokens ends where a live one begins, or the block.
    return jnp.where(dead, token + r.lengths[0, safe], token)


def _next_live(shape: _Shape, r: _Refs, run: _Run) -> Any:
    return _from(shape, r, run.token + run.length)


def _run(shape: _Shape, r: _Refs, token: Any, runs: Any) -> _Run:
    buffer = runs & (shape.tiles - 1)
    return _Run(token, r.lengths[0, token], r.slots[0, token], buffer)


def _split(x: Any, by: int) -> tuple[Any, Any]:
    """Quotient and remainder of what is not negative."""
    if by & (by - 1) == 0:
        return x >> (by.bit_length() - 1), x & (by - 1)
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))


def _place(shape: _Shape, r: _Refs, tile: Any) -> Any:
    """Where a tile lies in HBM."""
    if shape.rows == shape.page_size:
        return r.pages.at[tile]
    page, row = _split(tile, shape.page_size // shape.rows)
    row = pl.multiple_of(row * shape.rows, shape.rows)
    return r.pages.at[page, :, pl.ds(row, shape.rows)]


def _reading(shape: _Shape, r: _Refs, buffer: Any, tile: Any) -> Any:
    return pltpu.make_async_copy(
        _place(shape, r, tile), r.ring.at[buffer], r.read.at[buffer]
    )


def _writing(shape: _Shape, r: _Refs, buffer: Any, tile: Any) -> Any:
    return pltpu.make_async_copy(
        r.ring.at[buffer], _place(shape, r, tile), r.written.at[buffer]
    )


def _await_write(shape: _Shape, r: _Refs, buffer: Any) -> None:
    @pl.when(r.state[buffer] != _NO_TILE)
    def _wait() -> None:
        _writing(shape, r, buffer, jnp.int32(0)).wait()


def _await_all(shape: _Shape, r: _Refs) -> None:
    def body(buffer: Any, carry: Any) -> Any:
        _await_write(shape, r, buffer)
        r.state[buffer] = jnp.int32(_NO_TILE)
        return carry

    lax.fori_loop(jnp.int32(0), jnp.int32(shape.tiles), body, jnp.int32(0))


def _in_ring(shape: _Shape, r: _Refs, tile: Any) -> Any:
    found = [r.state[buffer] == tile for buffer in range(shape.tiles)]
    return functools.reduce(jnp.logical_or, found)


def _fetch_ahead(
    shape: _Shape, r: _Refs, ahead: Any, fetched: Any, runs: Any
) -> tuple[Any, Any]:
    """Fetches for the runs from token ``ahead`` on, up to half of the ring.

    But a tile that an earlier run changes, which slots out of order or a
    block's end bring about, is not read before that is done.
    """

    def goes_on(carry: Any) -> Any:
        ahead, fetched, clash = carry
        room = fetched - runs < shape.tiles // 2
        return room & (ahead < shape.tokens) & jnp.logical_not(clash)

    def body(carry: Any) -> Any:
        ahead, fetched, _ = carry
        run = _run(shape, r, ahead, fetched)
        tile, _ = _split(run.slot, shape.rows)
        again = _in_ring(shape, r, tile)
        clash = again & (fetched != runs)

        @pl.when(again & (fetched == runs))
        def _settle() -> None:
            _await_all(shape, r)

        @pl.when(jnp.logical_not(clash))
        def _go() -> None:
            _fetch(shape, r, run, tile)

        return (
            jnp.where(clash, ahead, _next_live(shape, r, run)),
            jnp.where(clash, fetched, fetched + 1),
            clash,
        )

    start = (ahead, fetched, jnp.zeros((), bool))
    ahead, fetched, _ = lax.while_loop(goes_on, body, start)
    return ahead, fetched


def _fetch(shape: _Shape, r: _Refs, run: _Run, tile: Any) -> None:
    """Takes a buffer for a run, and reads what the run does not cover."""
    _await_write(shape, r, run.buffer)
    r.state[run.buffer] = tile

    @pl.when(run.length < shape.rows)
    def _read() -> None:
        _reading(shape, r, run.buffer, tile).start()


def _change(shape: _Shape, r: _Refs, run: _Run) -> None:
    """Puts a run's tokens into its tile, and sends that on its way back."""
    tile, offset = _split(run.slot, shape.rows)

    @pl.when(run.length < shape.rows)
    def _wait() -> None:
        _reading(shape, r, run.buffer, tile).wait()

    begin = shape.margin + run.token - offset
    row = lax.broadcasted_iota(jnp.int32, (shape.rows, _LANES), 0)
    new = (row >= offset) & (row < offset + run.length)
    for plane in range(shape.planes):
        for chunk, lanes in enumerate(shape.chunks):
            kv = r.wide[chunk, plane, pl.ds(begin, shape.rows)]
            old = r.ring[run.buffer, plane, :, lanes]
            old = pltpu.bitcast(old, shape.integer).astype(jnp.int32)
            kv = jnp.where(new, kv, old).astype(shape.integer)
            kv = pltpu.bitcast(kv, shape.dtype)
            r.ring[run.buffer, plane, :, lanes] = kv
    _writing(shape, r, run.buffer, tile).start()
