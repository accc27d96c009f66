"""The same batch in the layouts that other kernels read, and back.

====================  =====================================================
:class:`FlatLayout`   a page table of max_num_seqs * pages_per_seq in one
                      dimension, as tpu-inference's kernels take it
:class:`RaggedLayout` rows of pages without gaps, found by sums of KV lengths
                      rounded up to pages, as SGLang-JAX's kernels take it
:class:`IndptrLayout` rows of pages without gaps, found by sums of their pages,
                      and how full the last one is, as FlashInfer takes it
====================  =====================================================

Shapes are static, and what is dead is defined: pages and lengths 0, running
sums the total. Letters: S max_num_seqs, P pages_per_seq, C capacity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagemill import _core
from pagemill import batch as batch_lib
from pagemill.batch import STATICS, RaggedBatch, as_int32
from pagemill.errors import PagemillError
from pagemill.pool import Int32Array, as_count
from pagemill.validation import validate


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Layout:
    """What all layouts share: their sizes; arrays become int32."""

    page_size: int
    total_num_pages: int
    max_num_tokens: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in STATICS:
                value = as_count(field.name, value)
                if value < 1:
                    raise PagemillError(
                        f"{field.name}={value} must be positive."
                    )
            elif value is not None:
                value = np.asarray(as_int32(field.name, value))
                if value.ndim != 1:
                    raise PagemillError(
                        f"{field.name} has shape {value.shape}; it must be "
                        "one-dimensional. Flatten it: .reshape(-1)."
                    )
            object.__setattr__(self, field.name, value)

    @property
    def _statics(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in STATICS}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class FlatLayout(_Layout):
    """tpu-inference's: the page table in one dimension.

    Attributes:
      kv_lens: i32[S].
      page_indices: i32[S * P], row by row; dead slots hold 0.
      cu_q_lens: i32[S + 1].
      distribution: i32[3]: (i, j, k), as of :class:`RaggedBatch`.
      page_size, total_num_pages, max_num_tokens: as of :class:`RaggedBatch`.
    """

    kv_lens: Int32Array
    page_indices: Int32Array
    cu_q_lens: Int32Array
    distribution: Int32Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RaggedLayout(_Layout):
    """SGLang-JAX's: pages found by sums of page-aligned KV lengths.

    Attributes:
      kv_lens: i32[S].
      page_indices: i32[C]; row r's pages begin at ``cu_kv_lens[r] //
        page_size``; 0 after the last.
      cu_q_lens: i32[S + 1].
      cu_kv_lens: i32[S + 1], 0 and the running sum of kv_lens, each rounded up
        to a multiple of page_size.
      distribution: i32[3]: (i, j, k), as of :class:`RaggedBatch`.
      page_size, total_num_pages, max_num_tokens: as of :class:`RaggedBatch`.
    """

    kv_lens: Int32Array
    page_indices: Int32Array
    cu_q_lens: Int32Array
    cu_kv_lens: Int32Array
    distribution: Int32Array


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class IndptrLayout(_Layout):
    """FlashInfer's: pages found by sums of their number.

    FlashInfer takes arrays of the live rows only: slice with num_seqs.

    Attributes:
      qo_indptr: i32[S + 1], cu_q_lens.
      kv_indptr: i32[S + 1], 0 and the running sum of rows' pages.
      kv_indices: i32[C]; row r's pages are those from ``kv_indptr[r]`` to
        ``kv_indptr[r + 1]``; 0 after the last.
      last_page_len: i32[S], tokens in each row's last page, 1 to page_size; 0
        for a row without pages.
      num_seqs: i32[1].
      page_size, total_num_pages, max_num_tokens: as of :class:`RaggedBatch`.
    """

    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    last_page_len: Int32Array
    num_seqs: Int32Array


def as_flat(batch: RaggedBatch) -> FlatLayout:
    """The batch as tpu-inference's kernels take it.

    Raises:
      PagemillError: not a batch, or one that breaks its structure's rules.
    """
    core = proved(batch)
    return FlatLayout(
        **_live(batch),
        page_indices=core.flat(),
        distribution=_distribution_of(batch),
        **_statics(batch),
    )


def as_ragged(batch: RaggedBatch, capacity: int | None = None) -> RaggedLayout:
    """The batch as SGLang-JAX's kernels take it.

    Args:
      batch: the batch, on the host.
      capacity: entries of page_indices; what is always enough, max_num_seqs *
        pages_per_seq, when None.

    Raises:
      PagemillError: more pages than the capacity; a sum that int32 cannot hold;
        not a batch, or one that breaks its structure's rules.
    """
    core = proved(batch)
    cu_kv_lens, pages = core.ragged(_capacity(batch, capacity))
    return RaggedLayout(
        **_live(batch),
        page_indices=pages,
        cu_kv_lens=cu_kv_lens,
        distribution=_distribution_of(batch),
        **_statics(batch),
    )


def as_indptr(batch: RaggedBatch, capacity: int | None = None) -> IndptrLayout:
    """The batch as FlashInfer takes it.

    Args:
      batch: the batch, on the host.
      capacity: entries of kv_indices; what is always enough, max_num_seqs *
        pages_per_seq, when None.

    Raises:
      PagemillError: more pages than the capacity; not a batch, or one that
        breaks its structure's rules.
    """
    core = proved(batch)
    kv_indptr, last_page_len, pages = core.indptr(_capacity(batch, capacity))
    return IndptrLayout(
        qo_indptr=_live(batch)["cu_q_lens"],
        kv_indptr=kv_indptr,
        kv_indices=pages,
        last_page_len=last_page_len,
        num_seqs=np.array(batch.num_seqs),
        **_statics(batch),
    )


def from_flat(layout: FlatLayout) -> RaggedBatch:
    """A batch, with its slot_mapping, of tpu-inference's layout.

    Raises:
      PagemillError: what is live breaks a rule of :func:`pagemill.validate`'s
        structure level, or arrays do not fit together.
    """
    rows, size = layout.kv_lens.size, layout.page_indices.size
    if rows == 0 or size == 0 or size % rows:
        raise PagemillError(
            f"page_indices has {size} entries, which is no positive multiple "
            f"of the {rows} rows of kv_lens. Pass max_num_seqs * "
            "pages_per_seq entries, row by row."
        )
    return _make_batch(
        layout,
        layout.kv_lens,
        layout.page_indices.reshape(rows, -1),
        layout.cu_q_lens,
        layout.distribution,
    )


def from_ragged(
    layout: RaggedLayout, *, pages_per_seq: int | None = None
) -> RaggedBatch:
    """A batch, with its slot_mapping, of SGLang-JAX's layout.

    Args:
      layout: the arrays.
      pages_per_seq: width of the batch's page table; the longest live row's
        when None.

    Raises:
      PagemillError: what is live breaks a rule of :func:`pagemill.validate`'s
        structure level; cu_kv_lens is not the sum of page-aligned kv_lens;
        or pages are missing.
    """
    live = _count_live(layout.distribution, layout.kv_lens)
    sums, size = layout.cu_kv_lens, layout.page_size
    _require_entries("cu_kv_lens", sums, layout.kv_lens.size + 1)
    slots = _slots(layout.kv_lens[:live], size)
    expected = _sums(slots * size)
    wrong = np.flatnonzero(sums[: live + 1] != expected)
    if wrong.size:
        at = int(wrong[0])
        raise PagemillError(
            f"cu_kv_lens[{at}]={sums[at]} must be {expected[at]}, the sum of "
            f"the kv_lens before it, each rounded up to page_size={size}. Sum "
            "the page-aligned lengths, from 0."
        )
    table = _pad_rows("page_indices", layout.page_indices, slots, pages_per_seq)
    return _make_batch(
        layout,
        layout.kv_lens,
        _add_rows(table, layout.kv_lens.size),
        layout.cu_q_lens,
        layout.distribution,
    )


def from_indptr(
    layout: IndptrLayout, *, pages_per_seq: int | None = None
) -> RaggedBatch:
    """A batch, with its slot_mapping, of FlashInfer's layout.

    Leading rows of one query token become the batch's decode rows.

    Args:
      layout: the arrays.
      pages_per_seq: width of the batch's page table; the longest live row's
        when None.

    Raises:
      PagemillError: what is live breaks a rule of :func:`pagemill.validate`'s
        structure level; kv_indptr does not start at 0 or falls; a last page
        that is empty or holds more than page_size; or pages are missing.
    """
    rows = layout.last_page_len.size
    live = _count_live(layout.num_seqs, layout.last_page_len)
    _require_entries("kv_indptr", layout.kv_indptr, rows + 1)
    _require_entries("qo_indptr", layout.qo_indptr, rows + 1)
    sums = layout.kv_indptr[: live + 1].astype(np.int64)
    slots = np.diff(sums)
    if sums[0] != 0 or np.any(slots < 0):
        raise PagemillError(
            f"kv_indptr={_few(sums)} must start at 0 and never fall. Sum the "
            "pages of each row."
        )
    kv_lens = np.zeros(rows, np.int64)
    kv_lens[:live] = _lengths(layout, slots)
    decodes = np.flatnonzero(np.diff(layout.qo_indptr[: live + 1]) != 1)
    first = int(decodes[0]) if decodes.size else live
    table = _pad_rows("kv_indices", layout.kv_indices, slots, pages_per_seq)
    return _make_batch(
        layout,
        kv_lens,
        _add_rows(table, rows),
        layout.qo_indptr,
        np.array([first, first, live], np.int32),
    )


def proved(batch: RaggedBatch) -> _core.HostBatch:
    """The batch as the core reads it, once its structure is proved.

    Raises:
      PagemillError: not a batch, traced, or one that breaks a rule.
    """
    if not isinstance(batch, RaggedBatch):
        raise PagemillError(
            f"batch is a {type(batch).__name__}, not a RaggedBatch. Make one "
            "of the bare arrays."
        )
    validate(batch, level="structure")
    return batch_lib.host_batch(batch)


def _statics(batch: RaggedBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in STATICS}


def _live(batch: RaggedBatch) -> dict[str, Any]:
    """kv_lens and cu_q_lens with defined tails."""
    live = int(np.asarray(batch.num_seqs)[0])
    kv_lens, cu_q_lens = np.array(batch.kv_lens), np.array(batch.cu_q_lens)
    kv_lens[live:] = 0
    cu_q_lens[live:] = cu_q_lens[live] if live else 0
    return {"kv_lens": kv_lens, "cu_q_lens": cu_q_lens}


def _distribution_of(batch: RaggedBatch) -> Int32Array:
    """The batch's; where it has none, every row is a mixed one."""
    if batch.distribution is not None:
        return np.array(batch.distribution)
    live = int(np.asarray(batch.num_seqs)[0])
    return np.array([0, 0, live], np.int32)


def _capacity(batch: RaggedBatch, capacity: int | None) -> int:
    if capacity is None:
        return batch.max_num_seqs * batch.pages_per_seq
    capacity = as_count("capacity", capacity)
    if not 0 <= capacity < 2**31:
        raise PagemillError(
            f"capacity={capacity} must be in range [0, 2147483647]."
        )
    return capacity


def _require_entries(name: str, array: Int32Array, entries: int) -> None:
    if array.size != entries:
        raise PagemillError(
            f"{name} has {array.size} entries; it must have {entries}: one a "
            "row, and one more."
        )


def _count_live(counts: Int32Array, rows: Int32Array) -> int:
    """The last of counts, as far as it is a number of rows."""
    live = int(counts[-1]) if counts.size else -1
    if not 0 <= live <= rows.size:
        raise PagemillError(
            f"num_seqs={live} must be in range [0, max_num_seqs={rows.size}]."
        )
    return live


def _slots(lengths: Int32Array, page_size: int) -> Any:
    return -(-lengths.astype(np.int64) // page_size)


def _sums(values: Any) -> Any:
    return np.concatenate([[0], np.cumsum(values)])


def _few(values: Any) -> str:
    shown = ", ".join(map(str, values[:8].tolist()))
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"


def _lengths(layout: IndptrLayout, slots: Any) -> Any:
    last = layout.last_page_len[: slots.size].astype(np.int64)
    wrong = np.flatnonzero(
        (slots > 0) & ((last < 1) | (last > layout.page_size))
    )
    if wrong.size:
        at = int(wrong[0])
        raise PagemillError(
            f"last_page_len[{at}]={last[at]} must be in range [1, page_size="
            f"{layout.page_size}]: the row has {slots[at]} pages. A full last "
            "page has page_size tokens, not 0."
        )
    return np.where(slots > 0, (slots - 1) * layout.page_size + last, 0)


def _pad_rows(
    name: str, pages: Int32Array, slots: Any, width: int | None
) -> Int32Array:
    """Rows without gaps as a table; dead slots hold 0."""
    if np.any(slots < 0):
        slots = np.maximum(slots, 0)  # The batch's own checks name the row.
    total, longest = int(slots.sum()), int(slots.max(initial=1))
    if total > pages.size:
        raise PagemillError(
            f"{name} has {pages.size} entries; the live rows have {total} "
            "pages. Pass all of them."
        )
    if width is None:
        width = longest
    width = as_count("pages_per_seq", width)
    if width < longest:
        raise PagemillError(
            f"pages_per_seq={width} must be at least {longest}, the pages of "
            f"row {int(slots.argmax())}."
        )
    table = np.zeros((slots.size, width), np.int32)
    table[np.arange(width) < slots[:, None]] = pages[:total]
    return table


def _add_rows(table: Int32Array, rows: int) -> Int32Array:
    return np.pad(table, ((0, rows - len(table)), (0, 0)))


def _make_batch(
    layout: _Layout,
    kv_lens: Any,
    page_indices: Int32Array,
    cu_q_lens: Int32Array,
    distribution: Sequence[int] | Int32Array,
) -> RaggedBatch:
    """A proved batch, to which its slot_mapping is added."""
    distribution = np.asarray(distribution)
    batch = RaggedBatch(
        kv_lens=kv_lens,
        page_indices=page_indices,
        cu_q_lens=cu_q_lens,
        num_seqs=distribution[-1:],
        distribution=distribution,
        **layout._statics,
    )
    slots = proved(batch).slot_mapping()
    return dataclasses.replace(batch, slot_mapping=slots)
