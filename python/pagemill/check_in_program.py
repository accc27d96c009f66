"""A batch's checks as one vectorised XLA program, for devices without C++.

The same rules as csrc/core/validate.cc, told apart only by code: which
sequence broke one is for the host to say. Lengths are int32 here, and the
core computes in int64: where a difference of two may not fit, it is taken
modulo 2^32 and used only where it is known not to be negative.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pagemill import _core

CheckCode = _core.CheckCode

_INT32_MAX = 2**31 - 1


def check_code(
    num_seqs: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    distribution: jax.Array,
    slot_mapping: jax.Array,
    *,
    page_size: int,
    total_num_pages: int,
    max_num_tokens: int,
    level: str,
    sliding_window: int = 0,
) -> jax.Array:
    """The kinds of rule that a batch breaks.

    Takes O(total_num_pages) memory at level "full": an int32 for each page.

    Args:
      num_seqs: i32[1].
      kv_lens: i32[max_num_seqs].
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      distribution: i32[3], or i32[0] for none.
      slot_mapping: i32[max_num_tokens], or i32[0] for none.
      page_size: tokens per page.
      total_num_pages: pages in the KV cache.
      max_num_tokens: rows of the token buffer.
      level: "structure" or "full".
      sliding_window: keys that a query sees, itself included; 0 for all.

    Returns:
      i32[1]: the sum of ``1 << code`` over every :class:`CheckCode` for which
      :func:`pagemill.validate` finds a violation; 0 for a valid batch.
    """
    rows, slots = page_indices.shape
    sizes = _sizes_code(
        (page_size, total_num_pages, max_num_tokens), rows * slots
    )
    if sizes & (1 << CheckCode.SIZE):
        return jnp.full((1,), sizes, jnp.int32)
    in_range = (num_seqs >= 0) & (num_seqs <= rows)
    early = sizes | _bit(CheckCode.NUM_SEQS, ~in_range)
    if sizes:
        return early
    r = _Rows(
        # Those of a wrong number of rows are not reported.
        jnp.where(in_range, num_seqs, 0)[0],
        kv_lens,
        page_indices,
        cu_q_lens,
        page_size,
        total_num_pages,
        sliding_window,
    )
    code = _lengths_code(r, max_num_tokens)
    code |= _bit(CheckCode.PAGE_OUT_OF_RANGE, r.live & ~r.in_range)
    if slot_mapping.shape[0]:
        wrong = _slots_are_wrong(r, slot_mapping)
        code |= _bit(CheckCode.SLOT_MAPPING, wrong)
    if distribution.shape[0]:
        ordered = _is_distribution(distribution, r.num_seqs)
        code |= _bit(CheckCode.DISTRIBUTION, ~ordered)
        if level == "full":
            code |= jnp.where(ordered, _ranges_code(r, distribution), 0)
    if level == "full":
        code |= _ownership_code(r)
    return jnp.where(in_range, code, early)


@dataclasses.dataclass
class _Rows:
    """A batch and what follows from it, row by row and slot by slot.

    Attributes:
      num_seqs: i32[], within the rows.
      page_size, total_num_pages: sound sizes.
      sliding_window: keys that a query sees; 0 for all.
      begin, end: i32[rows], a row's tokens.
      is_row: bool[rows], before num_seqs.
      falls, negative, exceeds, too_short: bool[rows], what is wrong with a
        live row's lengths.
      q_len: u32[rows], modulo 2^32; right where not falls.
      usable: bool[rows], live and its slots can be told from its lengths.
      live, written: bool[rows, slots], those that hold KV, and of them those
        that receive this step's; of usable rows.
      in_range: bool[rows, slots], the slot holds a page's id.
    """

    num_seqs: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    page_size: int
    total_num_pages: int
    sliding_window: int

    def __post_init__(self) -> None:
        rows, slots = self.page_indices.shape
        self.is_row = jnp.arange(rows, dtype=jnp.int32) < self.num_seqs
        self.begin, self.end = self.cu_q_lens[:-1], self.cu_q_lens[1:]
        kv_lens = jnp.maximum(self.kv_lens, 0)
        self.q_len = _unsigned(self.end) - _unsigned(self.begin)
        pages = _ceil_divide(kv_lens, self.page_size)
        sound = self.kv_lens >= 0
        self.falls = self.is_row & (self.end < self.begin)
        self.negative = self.is_row & ~sound
        self.exceeds = self.is_row & sound & ~self.falls
        self.exceeds &= self.q_len > _unsigned(kv_lens)
        self.too_short = self.is_row & sound & (pages > slots)
        wrong = self.falls | self.negative | self.exceeds | self.too_short
        self.usable = self.is_row & ~wrong

        slot = jnp.arange(slots, dtype=jnp.int32)
        # Of rows that are not usable the difference may be anything.
        query = jnp.maximum(kv_lens - self.q_len.astype(jnp.int32), 0)
        first = _divide(query, self.page_size)
        first = jnp.where(self.q_len == 0, pages, first)
        self.live = self.usable[:, None] & (slot < pages[:, None])
        if self.sliding_window:
            key = jnp.maximum(query - (self.sliding_window - 1), 0)
            self.live &= slot >= _divide(key, self.page_size)[:, None]
        self.written = self.live & (slot >= first[:, None])
        self.in_range = (self.page_indices >= 0) & (
            self.page_indices < self.total_num_pages
        )


def _sizes_code(sizes: tuple[int, int, int], table: int) -> int:
    """What is wrong with the static sizes, which no array can mend."""
    if not all(0 < size <= _INT32_MAX for size in sizes):
        return 1 << CheckCode.SIZE
    page_size, total_num_pages, _ = sizes
    product = max(total_num_pages * page_size, table)
    return (product > _INT32_MAX) << CheckCode.INT32_PRODUCT


def _lengths_code(r: _Rows, max_num_tokens: int) -> jax.Array:
    any_row = r.num_seqs > 0
    starts_elsewhere = any_row & (r.cu_q_lens[0] != 0)
    too_many = any_row & (r.cu_q_lens[r.num_seqs] > max_num_tokens)
    return (
        _bit(CheckCode.CU_Q_LENS_START, starts_elsewhere)
        | _bit(CheckCode.CU_Q_LENS_FALLS, r.falls)
        | _bit(CheckCode.TOTAL_TOKENS, too_many)
        | _bit(CheckCode.KV_LEN_NEGATIVE, r.negative)
        | _bit(CheckCode.QUERY_EXCEEDS_KV, r.exceeds)
        | _bit(CheckCode.ROW_TOO_SHORT, r.too_short)
    )


def _is_distribution(distribution: jax.Array, num_seqs: jax.Array) -> jax.Array:
    decode, prefill, total = distribution
    ordered = (decode >= 0) & (decode <= prefill) & (prefill <= total)
    return ordered & (total == num_seqs)


def _ranges_code(r: _Rows, distribution: jax.Array) -> jax.Array:
    """Of rows that the distribution, which is sound, says are of a kind."""
    decode, prefill, _ = distribution
    row = jnp.arange(r.is_row.shape[0], dtype=jnp.int32)
    not_one = r.falls | (r.q_len != 1)
    # Rows that fall, and only they, have a negative length.
    first = jnp.minimum(decode, row.shape[0] - 1)
    differs = (r.q_len != r.q_len[first]) | (r.falls != r.falls[first])
    is_prefill = (row >= decode) & (row < prefill)
    return _bit(CheckCode.DECODE_ROW, (row < decode) & not_one) | _bit(
        CheckCode.PREFILL_ROW, is_prefill & differs
    )


def _ownership_code(r: _Rows) -> jax.Array:
    """Each page that is written is named by one live slot only."""
    nowhere = r.total_num_pages  # Past the last page: dropped.
    written = jnp.where(r.written & r.in_range, r.page_indices, nowhere)
    writers = jnp.zeros(r.total_num_pages, jnp.int32)
    writers = writers.at[written].add(1, mode="drop")
    read = r.live & ~r.written & r.in_range
    is_written = writers[jnp.where(read, r.page_indices, 0)] > 0
    return _bit(CheckCode.PAGE_WRITTEN_TWICE, writers > 1) | _bit(
        CheckCode.SHARED_PAGE_WRITTEN, read & is_written
    )


def _slots_are_wrong(r: _Rows, slot_mapping: jax.Array) -> jax.Array:
    """A token is not where its row says, or a dead one is somewhere.

    Where a token belongs can be told in sound rows only, and which tokens are
    dead only when all are sound.
    """
    tokens = slot_mapping.shape[0]
    sound = r.usable & ~jnp.any(r.live & ~r.in_range, axis=1)
    sound &= (r.begin >= 0) & (r.end <= tokens)
    total = jnp.where(r.num_seqs > 0, r.cu_q_lens[r.num_seqs], 0)
    dead = jnp.arange(tokens, dtype=jnp.int32) >= total
    wrong = jnp.all(sound | ~r.is_row) & jnp.any(dead & (slot_mapping != -1))
    # Until cu_q_lens falls, no two rows have a token in common: such runs are
    # taken one by one, and a batch that is right is one run.
    run = jnp.cumsum(r.falls, dtype=jnp.int32)
    return jax.lax.fori_loop(
        0,
        run[-1] + 1,
        lambda i, wrong: (
            wrong | _run_is_wrong(r, slot_mapping, sound & (run == i))
        ),
        wrong,
    )


def _run_is_wrong(
    r: _Rows, slot_mapping: jax.Array, chosen: jax.Array
) -> jax.Array:
    """Of the chosen rows' tokens; no two of these rows share one."""
    tokens, rows = slot_mapping.shape[0], chosen.shape[0]
    # Each token's row is the last that begins at or before it.
    begin = jnp.where(chosen & (r.end > r.begin), r.begin, tokens)
    row = jnp.zeros(tokens, jnp.int32)
    row = row.at[begin].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
    row = jax.lax.cummax(row)
    token = jnp.arange(tokens, dtype=jnp.int32)
    inside = chosen[row] & (token >= r.begin[row]) & (token < r.end[row])
    position = jnp.maximum(r.kv_lens[row] - (r.end[row] - token), 0)
    column = _divide(position, r.page_size)
    page = r.page_indices[row, jnp.minimum(column, r.live.shape[1] - 1)]
    slot = page * r.page_size + (position - column * r.page_size)
    return jnp.any(inside & (slot_mapping != slot))


def _bit(code: _core.CheckCode, broken: jax.Array) -> jax.Array:
    """i32[1]: the code's bit where anything is broken."""
    return jnp.where(jnp.any(broken), jnp.int32(1 << code), 0).reshape(1)


def _unsigned(lengths: jax.Array) -> jax.Array:
    return lengths.astype(jnp.uint32)


def _divide(lengths: jax.Array, size: int) -> jax.Array:
    """Of lengths that are not negative, where rounding is no question."""
    return jax.lax.div(lengths, jnp.int32(size))


def _ceil_divide(lengths: jax.Array, size: int) -> jax.Array:
    whole = _divide(lengths, size)
    return whole + (whole * size < lengths)
