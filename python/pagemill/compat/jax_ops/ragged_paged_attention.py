"""Stands in for jax's public module of the same name: change the import line.

The validators take what the public ones take, and hold it against Pagemill's
own spec and C++ validator. They name every problem at once, in the public
words where there are some, each with what to do about it; a problem that the
public validator would raise comes first. What differs:

- Errors are :class:`pagemill.PagemillError`, a ValueError, also where the
  public functions fail an assertion or cannot unpack a shape: an odd number of
  combined heads, a scale that is no number, an array of another rank.
- More is refused: dtypes that no kernel here or there computes with, a soft cap
  or scale that is negative or not finite, ``num_seqs`` that is not int32; and
  with values page ids out of range, offsets that do not start at 0 or fall,
  negative counts, and pages that are written for two sequences.
- ``kv_lens`` of rows behind ``num_seqs`` may hold anything, as their
  documentation says; the public validator counts them.
- Any number of heads will do. The public kernel, though not its validators,
  refuses those that XLA cannot tile.

:func:`ragged_paged_attention` takes pages of q's dtype or of 8 bits, where the
validators accept any pair of dtypes, and no mask value that would let a masked
key count.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

import pagemill
from pagemill import _core, spec
from pagemill.errors import PagemillError, Problem, SpecError
from pagemill.kernels.ragged_paged_attention.spec import RAGGED_PAGED_ATTENTION
from pagemill.params import Tuning
from pagemill.validation import CheckCode

DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)

# How the public validators' messages begin, in the order of their checks.
_PUBLIC_MESSAGES = (
    "num_seqs.shape=",
    "Q head_dim ",
    "Expected kv_lens.shape=",
    "Expected cu_q_lens.shape=",
    "The dtype of `kv_lens`, ",
    "num_q_heads=",
    "sliding_window=",
    "soft_cap=",
    "num_kv_pages_per_block=",
    "num_queries_per_block=",
    "vmem_limit_bytes=",
)
_PUBLIC_CODES = (
    CheckCode.NUM_SEQS,
    CheckCode.ROW_TOO_SHORT,
    CheckCode.TOTAL_TOKENS,
    CheckCode.QUERY_EXCEEDS_KV,
)


def _as_public(op: spec.OpSpec) -> spec.OpSpec:
    """The op's own spec, with what only the public kernel takes."""
    scales = ("mask_value", "k_scale", "v_scale")
    return dataclasses.replace(
        op,
        operands=tuple(
            o
            for o in op.operands
            if o.name not in ("k", "v", "sinks", "tree_mask", *scales)
        ),
        relations=tuple(
            r
            for r in op.relations
            if not r.rule.startswith("q.dtype == kv_pages.dtype")
        ),
        attributes=(
            *(a for a in op.attributes if a.name not in scales),
            *(spec.Attribute(name, "float") for name in scales),
        ),
    )


_PUBLIC = _as_public(RAGGED_PAGED_ATTENTION)


def static_validate_inputs(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> None:
    """Checks shapes, dtypes and options; values are not looked at.

    Args:
      q: [max_num_tokens, num_q_heads, head_dim]; like all arrays also a tracer
        or a ShapeDtypeStruct.
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim].
      kv_lens: i32[max_num_seqs].
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1].
      sm_scale: this and what follows: None is not checked.
      sliding_window: keys that a query keeps.
      soft_cap: of the logits.
      mask_value: any number.
      k_scale: any number.
      v_scale: any number.
      num_kv_pages_per_block: at most pages_per_seq.
      num_queries_per_block: positive.
      vmem_limit_bytes: positive.

    Raises:
      SpecError: with every problem.
    """
    try:
        spec.check(
            _PUBLIC,
            {
                "q": q,
                "kv_pages": kv_pages,
                "kv_lens": kv_lens,
                "page_indices": page_indices,
                "cu_q_lens": cu_q_lens,
                "num_seqs": num_seqs,
            },
            {
                "sm_scale": sm_scale,
                "sliding_window": sliding_window,
                "soft_cap": soft_cap,
                "mask_value": mask_value,
                "k_scale": k_scale,
                "v_scale": v_scale,
                "num_kv_pages_per_block": num_kv_pages_per_block,
                "num_queries_per_block": num_queries_per_block,
                "vmem_limit_bytes": vmem_limit_bytes,
            },
        )
    except SpecError as error:
        problems = [p for p in error.violations if isinstance(p, Problem)]
        raise SpecError(error.op, sorted(problems, key=_public_rank)) from None


def dynamic_validate_inputs(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> None:
    """Checks everything, values as well: on the host, in one C++ pass.

    Args:
      q: as in :func:`static_validate_inputs`; of q and kv_pages only shapes
        and dtypes are looked at.
      kv_pages: as there.
      kv_lens: as there; this and what follows numpy or jax arrays.
      page_indices: as there.
      cu_q_lens: as there.
      num_seqs: as there.
      sm_scale: this and what follows as there.
      sliding_window: as there.
      soft_cap: as there.
      mask_value: as there.
      k_scale: as there.
      v_scale: as there.
      num_kv_pages_per_block: as there.
      num_queries_per_block: as there.
      vmem_limit_bytes: as there.

    Raises:
      SpecError: shapes, dtypes or options, with every problem.
      PagemillError: values, with every violation.
    """
    static_validate_inputs(
        q,
        kv_pages,
        kv_lens,
        page_indices,
        cu_q_lens,
        num_seqs,
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        mask_value=mask_value,
        k_scale=k_scale,
        v_scale=v_scale,
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )
    try:
        pagemill.validate(
            kv_lens=kv_lens,
            page_indices=page_indices,
            cu_q_lens=cu_q_lens,
            num_seqs=num_seqs,
            page_size=kv_pages.shape[1],
            total_num_pages=kv_pages.shape[0],
            max_num_tokens=q.shape[0],
        )
    except PagemillError as error:
        found = [v for v in error.violations if isinstance(v, _core.Violation)]
        if not found:
            raise
        found.sort(key=_public_order)
        raise PagemillError(_core.format_violations(found), found) from None


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    mask_value: float | None = DEFAULT_MASK_VALUE,
    k_scale: float | None = None,
    v_scale: float | None = None,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
) -> jax.Array:
    """:func:`pagemill.ragged_paged_attention` with the public signature.

    Runs on every platform. Rows behind the last live token are 0, where the
    public kernel leaves what was there before; a query that sees no key
    yields 0.

    Args:
      q: f32 or bf16 [max_num_tokens, num_q_heads, head_dim].
      kv_pages: [total_num_pages, page_size, 2 * num_kv_heads, head_dim], q's
        dtype; they hold this step's keys and values already.
      kv_lens: i32[max_num_seqs], this step's tokens included.
      page_indices: i32[max_num_seqs, pages_per_seq].
      cu_q_lens: i32[max_num_seqs + 1].
      num_seqs: i32[1].
      sm_scale: factor on the logits.
      sliding_window: keys that a query keeps, itself included; None: all.
      soft_cap: soft_cap * tanh(logit / soft_cap); None: off.
      mask_value: at most -1e30, which changes nothing: masked keys have no
        weight.
      k_scale: what is stored times this is K; also an array or traced.
      v_scale: as k_scale, for V.
      num_kv_pages_per_block: how the TPU kernel cuts its work, as what follows.
      num_queries_per_block: query tokens at a time.
      vmem_limit_bytes: VMEM the compiler may use.

    Returns:
      out, shaped and typed like q.

    Raises:
      PagemillError: as :func:`pagemill.ragged_paged_attention`.
    """
    out: jax.Array = pagemill.ragged_paged_attention(
        q,
        kv_pages,
        (kv_lens, page_indices, cu_q_lens, num_seqs),
        sm_scale=sm_scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        mask_value=mask_value,
        k_scale=k_scale,
        v_scale=v_scale,
        tuning=Tuning(
            num_kv_pages_per_block=num_kv_pages_per_block,
            num_queries_per_block=num_queries_per_block,
            vmem_limit_bytes=vmem_limit_bytes,
        ),
    )
    return out


def _public_rank(problem: Problem) -> int:
    """The place of a problem's message among the public ones."""
    for rank, words in enumerate(_PUBLIC_MESSAGES):
        if problem.message.startswith(words):
            return rank
    return len(_PUBLIC_MESSAGES)


def _public_order(violation: _core.Violation) -> tuple[int, int]:
    """Public checks first; of rows too short the longest is theirs."""
    if violation.code not in _PUBLIC_CODES:
        return len(_PUBLIC_CODES), 0
    rank = _PUBLIC_CODES.index(violation.code)
    is_length = violation.code == CheckCode.ROW_TOO_SHORT
    return rank, -violation.value if is_length else 0
