"""Dense attention in float64 NumPy: what every implementation is held against.

It shares no code with the package, and goes the plain way: all logits of a
sequence at once, masked, one softmax.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def dense_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    sm_scale: float,
    causal: bool = True,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Attention of one sequence's last queries over all of its keys.

    Args:
      q: [n, num_q_heads, head_dim]; query i stands at position m - n + i.
      k: [m, num_kv_heads, head_dim].
      v: [m, num_kv_heads, head_dim].
      sm_scale: factor on the logits.
      causal: no key past a query's own position.
      sliding_window: keys that a query keeps, itself included.
      soft_cap: cap on the logits, applied before the mask.

    Returns:
      f64[n, num_q_heads, head_dim]; rows with no visible key are 0.
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
    if causal:
        visible &= key <= position
    if sliding_window is not None:
        visible &= key > position - sliding_window
    logits = np.where(visible, logits, -np.inf)
    highest = logits.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isneginf(highest), 0.0, highest))
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / np.where(total == 0.0, 1.0, total)
    out = np.einsum("hgnm,mhd->nhgd", weights, v)
    return out.reshape(n, num_q_heads, head_dim)


def ragged_paged_attention(
    q: Array,
    kv_pages: Array,
    kv_lens: Array,
    page_indices: Array,
    cu_q_lens: Array,
    num_seqs: Array,
    **options: Any,
) -> Array:
    """Each sequence's pages gathered, then :func:`dense_attention`.

    Args:
      q: [max_num_tokens, num_q_heads, head_dim].
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim].
      kv_lens: i32[max_num_seqs].
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1].
      **options: of :func:`dense_attention`.

    Returns:
      f64, shaped like q; dead rows are 0.
    """
    out = np.zeros(q.shape, np.float64)
    page_size = kv_pages.shape[1]
    for seq in range(int(num_seqs[0])):
        begin, end = int(cu_q_lens[seq]), int(cu_q_lens[seq + 1])
        length = int(kv_lens[seq])
        if begin == end:
            continue
        pages = page_indices[seq, : -(-length // page_size)]
        kv = kv_pages[pages].reshape(-1, *kv_pages.shape[2:])[:length]
        out[begin:end] = dense_attention(
            q[begin:end], kv[:, 0::2], kv[:, 1::2], **options
        )
    return out
