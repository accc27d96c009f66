"""tpu-inference's ragged paged attention v3, as specs for pagemill.inspect.

Its two modules import nothing but JAX; ModuleNotFoundError if they are absent.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from pagemill.inspect import generation, simulated_scalars

from benchmarks.tpu_work import (
    HEAD_DIM,
    KV_HEADS,
    Q_HEADS,
    Work,
    block_macs,
    integers,
    shaped,
)

DECODE, PREFILL = "^RPAd", "^RPAm"
_MODULE = "tpu_inference.kernels.ragged_paged_attention.v3.kernel"
_VERSIONS = {"v4": 4, "v5e": 5, "v5p": 5, "v6e": 6, "7x": 7}
_QUERIES, _PREFILL_KEYS = 128, 512


def attend(
    tpu: str, keys: int, *, simulated: bool = False, **work: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Decode with blocks of ``keys``, or prefill with blocks of 128 by 512.

    Args:
      tpu: which generation it takes its device for.
      keys: KV tokens of a decode block.
      simulated: whether the simulator has to see the workload's scalars.
      **work: fields of Work.
    """
    made = Work(**work)
    theirs: Any = importlib.import_module(_MODULE)
    # It would ask the first device that there is.
    theirs.get_tpu_version = lambda: _VERSIONS[generation(tpu).name]
    decodes = made.q_len == 1
    scales = (
        {} if made.kv_dtype == "bfloat16" else {"k_scale": 1.0, "v_scale": 1.0}
    )
    fn = functools.partial(
        theirs.ragged_paged_attention,
        d_block_sizes=(1, keys, 1, keys),
        m_block_sizes=(_QUERIES, _PREFILL_KEYS) * 2
        if not decodes
        else (32, 512, 32, 512),
        **scales,
    )
    new = shaped(made.tokens, KV_HEADS, HEAD_DIM, dtype=made.kv_dtype)
    pages = theirs.get_kv_cache_shape(
        made.total_num_pages, made.page_size, KV_HEADS, HEAD_DIM, new.dtype
    )
    args = (
        shaped(made.tokens, Q_HEADS, HEAD_DIM),
        new,
        new,
        shaped(*pages, dtype=made.kv_dtype),
        integers(made.seqs),
        integers(made.seqs * made.pages_per_seq),
        integers(made.seqs + 1),
        integers(3),
    )
    known = {
        "loop_kv": keys if decodes else _PREFILL_KEYS,
        "loop_macs": block_macs(_QUERIES, _PREFILL_KEYS),
    }
    return (
        simulated_scalars(fn, _scalars(made)) if simulated else fn,
        args,
        known,
    )


def _scalars(work: Work) -> list[Any]:
    decodes = work.seqs if work.q_len == 1 else 0
    distribution = (decodes, decodes, work.seqs)
    return [
        work.length,
        lambda slot: slot,
        lambda seq: seq * work.q_len,
        lambda part: distribution[int(part)],
    ]
