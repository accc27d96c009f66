"""Dense attention in float64 NumPy: what every implementation is held against.

It shares no code with the package, and goes the plain way: all logits of a
sequence at once, masked, one softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def dense_attention(q: Array, k: Array, v: Array, **options: Any) -> Array:
    """The output of :func:`dense_attention_and_lse`."""
    return dense_attention_and_lse(q, k, v, **options)[0]


def dense_attention_and_lse(
    q: Array,
    k: Array,
    v: Array,
    *,
    sm_scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    tree: Array | None = None,
) -> tuple[Array, Array]:
    """Attention of one sequence's last queries over all of its keys.

    Args:
      q: [n, num_q_heads, head_dim]; query i stands at position m - n + i.
      k: [m, num_kv_heads, head_dim].
      v: [m, num_kv_heads, head_dim].
      sm_scale: factor on the logits.
      causal: no key past a query's own position.
      sliding_window: keys that a query keeps, itself included.
      soft_cap: cap on the logits, applied before the mask.
      sinks: [num_q_heads] or None: one more logit, without a value.
      tree: bool[n, n] or None, in place of causal: whether query i sees the
        j-th of the last n keys; older ones all do.

    Returns:
      f64[n, num_q_heads, head_dim]; rows with no visible key are 0. And
      f64[n, num_q_heads], the log-sum-exp of the logits, or -inf.
    """
    n, num_q_heads, head_dim = q.shape
    m, num_kv_heads, _ = k.shape
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    grouped = q.reshape(n, num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    logits = np.einsum("nhgd,mhd->hgnm", grouped, k) * sm_scale
    if soft_cap is not None:
        logits = soft_cap * np.tanh(logits / soft_cap)
    position = np.arange(m - n, m)[:, None]
    key = np.arange(m)[None, :]
    visible = np.ones((n, m), bool)
    if tree is not None:
        visible[:, m - n :] &= tree
    elif causal:
        visible &= key <= position
    if sliding_window is not None:
        visible &= key > position - sliding_window
    logits = np.where(visible, logits, -np.inf)
    # A masked key's value does not count, whatever it is.
    v = np.where(visible.any(axis=0)[:, None, None], v, 0.0)
    if sinks is not None:
        sink = sinks.astype(np.float64).reshape(num_kv_heads, -1, 1, 1)
        sink = np.broadcast_to(sink, (*logits.shape[:3], 1))
        logits = np.concatenate([logits, sink], axis=-1)
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    highest = np.where(np.isneginf(highest), 0.0, highest)
    weights = np.exp(logits - highest)
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (highest + np.log(total))[..., 0]
    weights = weights[..., :m] / np.where(total == 0.0, 1.0, total)
    out = np.einsum("hgnm,mhd->nhgd", weights, v)
    return (
        out.reshape(n, num_q_heads, v.shape[-1]),
        np.moveaxis(lse, 2, 0).reshape(n, num_q_heads),
    )


def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    **options: Any,
) -> Array:
    """The output of :func:`ragged_paged_attention_and_lse`."""
    return ragged_paged_attention_and_lse(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, **options
    )[0]


def ragged_paged_attention_and_lse(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    *,
    k_scale: Array | float = 1.0,
    v_scale: Array | float = 1.0,
    tree_mask: Array | None = None,
    **options: Any,
) -> tuple[Array, Array]:
    """Each sequence's pages gathered, then :func:`dense_attention_and_lse`.

    Args:
      q: [max_num_tokens, num_q_heads, head_dim].
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim].
      kv_lens: i32[max_num_seqs].
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1].
      k_scale: factors on what kv_pages holds, [num_kv_heads] or one.
      v_scale: as k_scale.
      tree_mask: u32[max_num_tokens, words] or None: bit j % 32 of word j // 32
        says whether a token sees its sequence's j-th token of this step.
      **options: of :func:`dense_attention_and_lse`.

    Returns:
      f64, shaped like q, and f64[max_num_tokens, num_q_heads]; dead rows are 0
      and -inf.
    """
    out = np.zeros(q.shape, np.float64)
    lse = np.full(q.shape[:2], -np.inf)
    k_scale, v_scale = (np.reshape(x, (-1, 1)) for x in (k_scale, v_scale))
    page_size = kv_pages.shape[1]
    for seq in range(int(num_seqs[0])):
        begin, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        length = int(kv_lens[seq])
        if begin == end:
            continue
        pages = page_indices[seq, : -(-length // page_size)]
        kv = kv_pages[pages].reshape(-1, *kv_pages.shape[2:])[:length]
        kv = kv.astype(np.float64)
        tree = None
        if tree_mask is not None:
            bits = np.arange(end - begin)
            words = tree_mask[begin:end, bits // 32]
            tree = (words >> (bits % 32).astype(np.uint32)) & 1 == 1
        out[begin:end], lse[begin:end] = dense_attention_and_lse(
            q[begin:end],
            kv[:, 0::2] * k_scale,
            kv[:, 1::2] * v_scale,
            tree=tree,
            **options,
        )
    return out, lse
