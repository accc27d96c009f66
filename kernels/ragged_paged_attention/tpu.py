"""The op on TPUs: rows of few query tokens by one kernel, others by another.

Both run in every call, each over the rows that are its own: which these are is
data, not shape, so that one program serves any mixture.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from pagemill.kernels.ragged_paged_attention.decode import decode_attention
from pagemill.kernels.ragged_paged_attention.operands import Operands
from pagemill.kernels.ragged_paged_attention.prefill import prefill_attention
from pagemill.kv_cache import KVLayout, with_lanes
from pagemill.params import AttentionParams, Tuning


def ragged_paged_attention_tpu(
    operands: Operands,
    *,
    params: AttentionParams,
    tuning: Tuning,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Attention of every live query token; see the op for the arguments.

    ``interpret`` is False, or pltpu.InterpretParams to run on a CPU.
    """
    head_dim, stored = operands.head_dim, operands.kv_pages.shape[-1]
    if params.kv_layout is KVLayout.PLANES and stored > head_dim:
        padded = operands._replace(q=with_lanes(operands.q, stored))
        out, *lse = ragged_paged_attention_tpu(
            padded, params=params, tuning=tuning, interpret=interpret
        )
        return out[..., :head_dim], *lse
    o = operands
    few = tuning.num_decode_queries or 1
    rows = _rows(o)
    table = o.page_indices.reshape(-1)
    common = {
        "params": params,
        "tuning": tuning,
        "k_scale": o.k_scale,
        "v_scale": o.v_scale,
        "sinks": o.sinks,
        "interpret": interpret,
    }
    decode = decode_attention(
        _few_queries(o, rows, few),
        o.kv_pages,
        o.kv_lens,
        rows.q_lens,
        table,
        o.num_seqs,
        tree_mask=_few_words(o, rows, few),
        **common,
    )
    prefill = prefill_attention(
        o.q,
        o.kv_pages,
        o.kv_lens,
        table,
        o.cu_q_lens,
        o.num_seqs,
        min_q_len=few + 1,
        tree_mask=o.tree_mask,
        **common,
    )
    outs = _merged(rows, few, decode, prefill)
    return outs if params.return_lse else outs[:1]


class _Rows(NamedTuple):
    """Whose the tokens are."""

    q_lens: jax.Array  # i32[S], 0 in dead rows
    starts: jax.Array  # i32[S], first token
    of_token: jax.Array  # i32[T], a row; any for dead tokens
    live: jax.Array  # bool[T]


def _rows(o: Operands) -> _Rows:
    seqs = o.page_indices.shape[0]
    live = jnp.clip(o.num_seqs[0], 0, seqs)
    alive = jnp.arange(seqs, dtype=jnp.int32) < live
    # Rows behind num_seqs may hold anything: they end where the live ones do.
    ends = jnp.where(alive, o.cu_q_lens[1:], o.cu_q_lens[live])
    starts = jnp.where(alive, o.cu_q_lens[:-1], o.cu_q_lens[live])
    token = jnp.arange(o.max_num_tokens, dtype=jnp.int32)
    of_token = jnp.searchsorted(ends, token, side="right").astype(jnp.int32)
    return _Rows(
        q_lens=ends - starts,
        starts=starts,
        of_token=jnp.minimum(of_token, seqs - 1),
        live=token < o.cu_q_lens[live],
    )


def _few_queries(o: Operands, rows: _Rows, few: int) -> jax.Array:
    """[S, few, Hq, D]: each row's first tokens, and what follows them."""
    token = rows.starts[:, None] + jnp.arange(few, dtype=jnp.int32)
    return o.q.at[token].get(mode="clip")


def _few_words(o: Operands, rows: _Rows, few: int) -> jax.Array | None:
    """u32[S, few]: so few tokens need one word of the mask each."""
    if o.tree_mask is None:
        return None
    token = rows.starts[:, None] + jnp.arange(few, dtype=jnp.int32)
    return o.tree_mask[:, 0].at[token].get(mode="clip")


def _merged(
    rows: _Rows,
    few: int,
    decode: tuple[jax.Array, jax.Array],
    prefill: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, ...]:
    """Each token's results, from the kernel that its row belongs to."""
    token = jnp.arange(rows.of_token.shape[0], dtype=jnp.int32)
    index = jnp.clip(token - rows.starts[rows.of_token], 0, few - 1)
    mine = rows.live & (rows.q_lens[rows.of_token] <= few)

    def pick(by_row: jax.Array, by_token: jax.Array) -> jax.Array:
        chosen = mine.reshape(-1, *[1] * (by_token.ndim - 1))
        return jnp.where(chosen, by_row[rows.of_token, index], by_token)

    return tuple(map(pick, decode, prefill))
