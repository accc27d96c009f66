"""The arrays that every implementation of the op is called with."""

from __future__ import annotations

from typing import Any, NamedTuple


class Operands(NamedTuple):
    """A pytree; what is None is absent.

    Attributes:
      q: [T, Hq, D], f32 or bf16.
      kv_pages: of params.kv_layout, q's dtype or an 8-bit one.
      kv_lens: i32[S].
      page_indices: i32[S, P].
      cu_q_lens: i32[S + 1].
      num_seqs: i32[1].
      sinks: f32[Hq] or None.
      k_scale: f32[Hkv] or None, as v_scale.
      v_scale: factors on stored keys and values.
      tree_mask: u32[T, words] or None.
    """

    q: Any
    kv_pages: Any
    kv_lens: Any
    page_indices: Any
    cu_q_lens: Any
    num_seqs: Any
    sinks: Any = None
    k_scale: Any = None
    v_scale: Any = None
    tree_mask: Any = None

    @property
    def max_num_tokens(self) -> int:
        """T."""
        return int(self.q.shape[0])

    @property
    def num_q_heads(self) -> int:
        """Hq."""
        return int(self.q.shape[1])

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.q.shape[2])
