"""Option bundles of the attention ops, as frozen dataclasses."""

from __future__ import annotations

import dataclasses

from pagemill.kv_cache import KVLayout


@dataclasses.dataclass(frozen=True)
class AttentionParams:
    """What attention computes, and on what; static under jit.

    Attributes:
      sm_scale: factor on the logits ``q . k``.
      causal: a query sees keys at positions up to its own. Query ``i`` of a
        sequence stands at position ``kv_len - q_len + i``.
      sliding_window: number of keys a query keeps, itself included; None keeps
        all. Applies on the left of the query's position, causal or not.
      soft_cap: ``soft_cap * tanh(logit / soft_cap)``, applied before masking;
        None leaves the logits as they are.
      num_kv_heads: heads of K, and of V; None where kv_pages' shape tells.
      kv_layout: how kv_pages is laid out.
      return_lse: also give the log-sum-exp of each row's logits.
    """

    sm_scale: float
    causal: bool = True
    sliding_window: int | None = None
    soft_cap: float | None = None
    num_kv_heads: int | None = None
    kv_layout: KVLayout = KVLayout.INTERLEAVED
    return_lse: bool = False


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a TPU kernel cuts its work; None means a fitted value.

    Attributes:
      num_kv_pages_per_block: KV pages fetched and computed at a time.
      num_queries_per_block: query tokens computed at a time.
      num_decode_queries: sequences of so many query tokens or fewer take the
        kernel for decoding; more than one where speculative tokens are common.
      num_kv_splits: parts that the decode kernel cuts a sequence's keys into,
        attended side by side and merged; more than one where few long
        sequences would leave cores idle.
      vmem_limit_bytes: VMEM the compiler may use.
      stream_page_table: whether page_indices stays in HBM and comes by small
        copies, not whole as a scalar operand.
    """

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    num_decode_queries: int | None = None
    num_kv_splits: int | None = None
    vmem_limit_bytes: int | None = None
    stream_page_table: bool | None = None


# Scalar memory of a TensorCore by TPU generation, in bytes. A kernel's scalar
# operands, the page table above all, must fit; the compiler keeps a little.
SMEM_BYTES = dict.fromkeys(("v4", "v5e", "v5p", "v6e", "7x"), 2**20)
SMEM_RESERVE = 8 * 2**10
