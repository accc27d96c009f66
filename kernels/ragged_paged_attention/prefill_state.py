"""What the parts of the prefill kernel hand to each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from pagemill.kernels.common import masking
from pagemill.kernels.common.exp2_softmax import LOG2_E
from pagemill.kernels.common.kv_block import KVBlock
from pagemill.kernels.common.page_table import PageTable
from pagemill.kernels.ragged_paged_attention.prefill_shape import PrefillShape
from pagemill.params import AttentionParams


@dataclasses.dataclass(frozen=True)
class Static:
    """What is known when the kernel is traced."""

    shape: PrefillShape
    block: KVBlock
    table: PageTable
    params: AttentionParams
    min_q_len: int
    sinks: bool
    k_scale: bool
    v_scale: bool
    tree_words: int = 0  # 0: no tree mask


@dataclasses.dataclass(frozen=True)
class Refs:
    """The kernel's operands and buffers.

    What is kept per query's row lies as [Hkv, 8, rows] by columns and as
    [Hkv, rows, LANES] by rows, repeated along the 8 or the LANES.
    """

    first_seqs: Any  # i32[tiles] SMEM, as all until num_seqs
    end_seqs: Any
    kv_lens: Any
    cu_q_lens: Any
    num_seqs: Any
    page_indices: Any  # in SMEM or HBM, see PageTable
    q: Any  # [Hkv, rows, D] VMEM
    scales: Any  # f32[2, Hkv] SMEM: of K and of V
    sinks: Any  # f32[Hkv, 1, rows], times log2 e
    tree: Any  # i32[words, 1, rows] by columns, [words, rows, 1] by rows
    kv_pages: Any  # [N, 2, Hkv, page_size, D] HBM
    out: Any  # as q
    lse: Any  # f32[Hkv, 1, rows]
    kv: Any  # two halves, see KVBlock
    arrived: Any  # DMA semaphore per half of kv
    top: Any  # f32, about the highest logit, times log2 e; -inf before any
    total: Any  # by rows: f32, sums of weights 2^(logit - top), lane by lane
    acc: Any  # f32[Hkv, D + 8, rows] by columns, with the totals behind D;
    # f32[Hkv, rows, D] by rows
    jump: Any  # by columns: f32, the highest weight before it was rescaled
    walk: Any  # i32[...] SMEM, see prefill_walk
    planes: Any  # see KVBlock
    words: Any
    windows: Any = None  # see PageTable
    window_arrived: Any = None


@dataclasses.dataclass(frozen=True)
class Edge:
    """What a block that some row does not see whole is masked by."""

    first_key: Any  # i32 scalar, position of the block's first key
    key_begin: Any  # i32 scalars: keys that any row of the tile sees
    key_end: Any
    begin: Any  # i32[1, rows] or [rows, 1]: keys that a row sees, none
    end: Any  # where it belongs to another sequence
    own: Any  # bool as these: the row belongs to the sequence
    first_new: Any  # i32 scalar, position of the sequence's first token
    tree: tuple[Any, ...]  # words of the rows' tree mask, as begin; or none

    def rows(self, part: slice) -> Edge:
        """Of some rows of the tile, by rows."""
        return dataclasses.replace(
            self,
            begin=self.begin[part],
            end=self.end[part],
            own=self.own[part],
            tree=tuple(word[part] for word in self.tree),
        )


def masked(
    static: Static, x: Any, edge: Edge, end: Any, axis: int, start: int = 0
) -> Any:
    """Logits, keys along an axis, with -inf where a row does not see a key."""
    key = edge.first_key + start
    key = key + lax.broadcasted_iota(jnp.int32, x.shape, axis)
    seen = key < end
    if static.params.sliding_window is not None:
        seen &= key >= edge.begin
    if edge.tree:
        seen &= masking.in_tree(edge.tree, key - edge.first_new)
    return jnp.where(seen, x, -jnp.inf)


def plane(static: Static, r: Refs, half: Any, which: int, head: Any) -> Any:
    """K (0) or V (1) of a head: [keys, D] as the products take it."""
    block = static.block
    x = block.plane(r.kv, half, r.planes, which, head, block.pages)
    return x.astype(static.shape.dtype)


def values(static: Static, r: Refs, half: Any, head: Any, edge: Any) -> Any:
    """V of a head; at an edge, 0 where nothing was fetched or nobody looks."""
    v = plane(static, r, half, 1, head)
    if edge is None:
        return v
    key = edge.first_key + lax.broadcasted_iota(jnp.int32, v.shape, 0)
    live = (key >= edge.key_begin) & (key < edge.key_end)
    return jnp.where(live, v.astype(jnp.float32), 0.0).astype(v.dtype)


def logits(static: Static, r: Refs, head: Any, products: Any) -> Any:
    """Scaled and capped, times log2 e, from the products of q and K.

    In float32: q scaled in bfloat16 would be rounded a second time.
    """
    params = static.params
    cap = params.soft_cap
    scale = params.sm_scale * LOG2_E if cap is None else params.sm_scale / cap
    if static.k_scale:
        scale = jnp.float32(scale) * r.scales[0, head]
    if cap is None:
        return products * scale
    return jnp.tanh(products * scale) * (cap * LOG2_E)


def dot(static: Static, a: Any, b: Any, contracting: tuple[int, int]) -> Any:
    """Sums in float32; exact products of float32 operands."""
    exact = static.shape.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((contracting[0],), (contracting[1],)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST if exact else None,
    )
