"""What the parts of the decode kernel share."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from pagemill.kernels.common.kv_block import KVBlock
from pagemill.kernels.common.page_table import PageTable
from pagemill.kernels.ragged_paged_attention.decode_shape import DecodeShape
from pagemill.params import AttentionParams

# Words of the state in SMEM. The fetching end of the loop: its part, its
# next entry of page_indices, pages to come, its buffer. The computing end: its
# buffer.
FETCH_PART, FETCH_ENTRY, FETCH_LEFT, FETCH_BUFFER, BUFFER = range(5)
STATE_WORDS = 5


@dataclasses.dataclass(frozen=True)
class Static:
    """What the kernel is built from."""

    shape: DecodeShape
    block: KVBlock
    table: PageTable
    params: AttentionParams
    tree: bool


@dataclasses.dataclass(frozen=True)
class Refs:
    """The kernel's operands and buffers."""

    kv_lens: Any  # i32[S] SMEM
    q_lens: Any  # i32[S] SMEM
    num_seqs: Any  # i32[1] SMEM
    tree: Any  # i32[S * queries] SMEM, without a tree mask one word
    page_indices: Any  # i32[S * pages_per_seq] SMEM or HBM, see PageTable
    q: Any  # [parts_per_step, dots, dot_rows, D] VMEM
    columns: Any  # f32[3, dots, dot_rows, LANES]: see decode_rows.columns
    kv_pages: Any  # [N, 2, Hkv, page_size, D] HBM
    out: Any  # as q
    lse: Any  # f32[parts_per_step, dots, 1, lanes]
    kv: Any  # see KVBlock
    arrived: Any  # DMA semaphore per buffer
    diagonal: Any  # [dots, dot_heads, dot_rows, D], rows of one head each
    highest: Any  # f32[dots, dot_rows, LANES], see exp2_softmax
    total: Any  # f32[dots, dot_rows, LANES]
    acc: Any  # f32[dots, dot_heads, dot_rows, D]; other heads' rows: garbage
    state: Any  # i32[STATE_WORDS] SMEM
    planes: Any  # see KVBlock
    words: Any
    windows: Any = None  # see PageTable
    window_arrived: Any = None


@dataclasses.dataclass(frozen=True)
class Span:
    """Keys of a part that its sequence's queries see; scalars."""

    kv_len: Any
    seq: Any
    q_len: Any  # 0 for a dead row
    first_page: Any
    pages: Any  # 0 for a dead row


def span_of(static: Static, r: Refs, part: Any) -> Span:
    """What a part of a sequence has to be attended."""
    shape, window = static.shape, static.params.sliding_window
    seq = part if shape.splits == 1 else lax.div(part, jnp.int32(shape.splits))
    kv_len, q_len = r.kv_lens[seq], r.q_lens[seq]
    live = (q_len > 0) & (q_len <= shape.queries)
    q_len = jnp.where(live, q_len, 0)
    first_page = jnp.int32(0)
    if window is not None:
        # In this order, nothing overflows, whatever the window.
        begin = jnp.maximum(jnp.maximum(kv_len - q_len, 0) - (window - 1), 0)
        first_page = lax.div(begin, jnp.int32(shape.page_size))
    pages = ceil_div(kv_len, shape.page_size) - first_page
    pages = jnp.where(live, pages, 0)
    if shape.splits > 1:
        begin, end = _share(shape, pages, part - seq * shape.splits)
        first_page, pages = first_page + begin, end - begin
    return Span(kv_len, seq, q_len, first_page, pages)


def _share(shape: DecodeShape, pages: Any, index: Any) -> tuple[Any, Any]:
    """The index-th part's pages among `pages`: whole blocks but the last."""
    blocks = ceil_div(pages, shape.block_pages)
    each = lax.div(blocks, jnp.int32(shape.splits))
    longer = blocks - each * shape.splits

    def begin(index: Any) -> Any:
        block = index * each + jnp.minimum(index, longer)
        return jnp.minimum(block * shape.block_pages, pages)

    return begin(index), begin(index + 1)


def ceil_div(x: Any, by: int) -> Any:
    """Rounds x / by up."""
    return lax.div(x + jnp.int32(by - 1), jnp.int32(by))  # int32 in x64 mode
