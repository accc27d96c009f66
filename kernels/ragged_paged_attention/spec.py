"""What ragged paged attention accepts: one table for all implementations.

The first sentence of a message is the one that users of the public kernels
search for, where there is one; the remedy is ours.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pagemill.batch import BATCH_OPERANDS
from pagemill.kernels.ragged_paged_attention.limits import tpu_limits
from pagemill.kv_cache import KVLayout
from pagemill.spec import (
    EIGHT_BITS,
    FLOATS,
    INT32,
    Attribute,
    Limits,
    Operand,
    OpSpec,
    Relation,
)

_KV_DTYPES = (*FLOATS, *EIGHT_BITS)
_KV_PAGES = Operand("kv_pages", ("N", "page", "C", "Dk"), _KV_DTYPES)
_K = Operand("k", ("T", "Hkv", "D"), _KV_DTYPES, optional=True)
_V = Operand("v", ("T", "Hkv", "Dv"), _KV_DTYPES, optional=True)
_NUM_KV_HEADS = Attribute(
    "num_kv_heads",
    "int",
    default="C // 2",
    rules=(
        (
            "value > 0",
            "num_kv_heads={value} must be positive.",
            "None takes what kv_pages' shape tells.",
        ),
    ),
)
_COMBINED_IS_EVEN = Relation(
    "C % 2 == 0",
    "kv_pages",
    "num_combined_kv_heads={num_combined_kv_heads} must be even: "
    "kv_pages.shape[2] holds K at even and V at odd heads.",
    "Interleave K and V: kv_pages[n, slot, 2*h] is K, [2*h + 1] is V.",
)
_HEADS_AS_STORED = Relation(
    "num_kv_heads == C // 2",
    "num_kv_heads",
    "num_kv_heads={num_kv_heads} must be num_combined_kv_heads / 2 = "
    "{kv_pages.shape[2]} / 2.",
    "None takes what kv_pages' shape tells.",
)
_SAME_HEAD_DIM = Relation(
    "max(D, v_head_dim) == Dk",
    "q",
    "Q head_dim {q.shape[2]} must be the same as that of K/V "
    "{kv_pages.shape[3]}.",
    "Give q and kv_pages one head_dim; where V has another than K, kv_pages "
    "has the larger and v_head_dim={v_head_dim} says V's.",
)
_WIDEST_AS_STORED = Relation(
    "max(D, Dv) == Dk",
    "k",
    "k.shape={k.shape} and v.shape={v.shape} must have heads of "
    "kv_pages.shape[3]={kv_pages.shape[3]}, the larger of the two.",
    "Give K and V with the head_dims that the cache is made for.",
)
_V_HEAD_DIM = Attribute(
    "v_head_dim",
    "int",
    default="D",
    rules=(
        (
            "value > 0",
            "v_head_dim={value} must be positive.",
            "None stands for head_dim.",
        ),
    ),
)
_V_AS_SAID = Relation(
    "Dv == v_head_dim",
    "v",
    "v.shape={v.shape} must have v_head_dim={v_head_dim} elements a head.",
    "Say v_head_dim where V's heads have another size than K's.",
)


def _written_dtype(name: str) -> Relation:
    return Relation(
        f"{name}.dtype == kv_pages.dtype or "
        f"kv_pages.dtype.itemsize == 1 < {name}.dtype.itemsize",
        name,
        f"The dtype of `{name}` must be that of kv_pages. "
        f"Got {name}.dtype={{{name}.dtype}}, "
        "kv_pages.dtype={kv_pages.dtype}.",
        f"Cast one: {name}.astype(kv_pages.dtype). Only pages of 8 bits take "
        "float32 or bfloat16, and round it.",
    )


def _fits_batch(rule: str, found: str, size: str, remedy: str) -> Relation:
    return Relation(
        f"batch.{size} == {rule}",
        "batch",
        f"batch.{size}={{batch.{size}}} must be {found}={{{found}}}.",
        remedy,
    )


_BATCH_FITS_PAGES = (
    _fits_batch(
        "page",
        "kv_pages.shape[1]",
        "page_size",
        "Plan the batch with the page size of the KV cache.",
    ),
    _fits_batch(
        "N",
        "kv_pages.shape[0]",
        "total_num_pages",
        "Make the pool as large as the KV cache.",
    ),
)
_WRITE_RELATIONS = (
    _COMBINED_IS_EVEN,
    _written_dtype("k"),
    _written_dtype("v"),
)
_SCALES = (
    Operand("k_scale", ("Ks",), ("float32",), optional=True),
    Operand("v_scale", ("Vs",), ("float32",), optional=True),
)


def _scales_fit(heads: str) -> tuple[Relation, ...]:
    return tuple(
        Relation(
            f"{letter} == {heads}",
            name,
            f"{name}.shape={{{name}.shape}} must be a scalar or have "
            f"{heads}={{{heads}}} entries.",
            "Give one factor for all heads, or one per KV head.",
        )
        for letter, name in (("Ks", "k_scale"), ("Vs", "v_scale"))
    )


_NOT_EMPTY = Relation(
    "min(N, page, C, Dk) > 0",
    "kv_pages",
    "kv_pages.shape={kv_pages.shape} must not have a dimension of 0.",
    "Make at least one page.",
)
_NOT_EMPTY_PAGES = dataclasses.replace(_NOT_EMPTY, rule="min(N, page, Dk) > 0")
_SLOTS_FIT_INT32 = Relation(
    "N * page <= 2147483647",
    "kv_pages",
    "kv_pages.shape={kv_pages.shape} has more token slots than int32 counts.",
    "Use fewer pages, or split the cache.",
)

UPDATE_KV_PAGES = OpSpec(
    name="update_kv_pages",
    operands=(
        _KV_PAGES,
        Operand("k", ("T", "Hkv", "D"), _KV_DTYPES),
        Operand("v", ("T", "Hkv", "Dv"), _KV_DTYPES),
        Operand("slot_mapping", ("T",), INT32),
        *_SCALES,
    ),
    relations=(
        _NOT_EMPTY,
        _SLOTS_FIT_INT32,
        *_WRITE_RELATIONS,
        _WIDEST_AS_STORED,
        Relation(
            "C == 2 * Hkv",
            "k",
            "k.shape={k.shape} must have num_combined_kv_heads / 2 = "
            "{kv_pages.shape[2]} / 2 heads.",
            "Give K and V with the heads that kv_pages holds.",
        ),
        *_scales_fit("Hkv"),
        *_BATCH_FITS_PAGES,
    ),
)

COPY_PAGES = OpSpec(
    name="copy_pages",
    operands=(_KV_PAGES, Operand("copies", ("n", "2"), INT32)),
    relations=(_NOT_EMPTY,),
)

MERGE_STATES = OpSpec(
    name="merge_states",
    operands=(
        Operand("outs", ("parts", "T", "Hq", "Dv"), FLOATS),
        Operand("lses", ("parts", "T", "Hq"), ("float32",)),
    ),
    relations=(
        Relation(
            "parts > 0",
            "outs",
            "outs.shape={outs.shape} must have a part.",
            "Stack the results of one call at least.",
        ),
    ),
)

_BLOCKS = (
    Attribute(
        "num_kv_pages_per_block",
        "int",
        rules=(
            (
                "0 < value <= P",
                "num_kv_pages_per_block={value} must be in range "
                "(0, {pages_per_seq}].",
                "A block holds at most one row of page_indices; None fits it.",
            ),
        ),
    ),
    *(
        Attribute(
            name,
            "int",
            rules=(
                (
                    "value > 0",
                    name + "={value} must be positive.",
                    "None takes a fitted value.",
                ),
            ),
        )
        for name in (
            "num_queries_per_block",
            "num_decode_queries",
            "num_kv_splits",
            "vmem_limit_bytes",
        )
    ),
    Attribute("stream_page_table", "bool"),
)

# Far enough from float32's ends that products with logits stay inside.
_FITS_FLOAT32 = "1e-30 <= value <= 1e30"

ATTRIBUTES = (
    Attribute(
        "sm_scale",
        "float",
        default="D ** -0.5",
        rules=(
            (
                "isfinite(value) and value > 0",
                "sm_scale={value} must be a positive finite number.",
                "None stands for head_dim ** -0.5.",
            ),
            (
                _FITS_FLOAT32,
                "sm_scale={value} must be in range [1e-30, 1e30].",
                "The kernels compute in float32.",
            ),
        ),
    ),
    Attribute("causal", "bool", default="True"),
    Attribute("return_lse", "bool", default="False"),
    _NUM_KV_HEADS,
    _V_HEAD_DIM,
    Attribute(
        "sliding_window",
        "int",
        rules=(
            (
                "value > 0",
                "sliding_window={value} must be positive.",
                "It counts the keys a query keeps, itself included; None "
                "keeps all.",
            ),
            (
                f"value <= {2**31 - 1}",
                "sliding_window={value} must fit int32.",
                "None keeps all keys.",
            ),
        ),
    ),
    Attribute(
        "soft_cap",
        "float",
        rules=(
            (
                "value != 0.0",
                "soft_cap={value} must not be 0.0.",
                "Pass None for no cap.",
            ),
            (
                "isfinite(value) and value > 0",
                "soft_cap={value} must be a positive finite number.",
                "Pass None for no cap.",
            ),
            (
                _FITS_FLOAT32,
                "soft_cap={value} must be in range [1e-30, 1e30].",
                "The kernels compute in float32. Pass None for no cap.",
            ),
        ),
    ),
    Attribute(
        "mask_value",
        "float",
        rules=(
            (
                "value <= -1e30",
                "mask_value={value} must be at most -1e30.",
                "A masked key counts exactly 0 here whatever the value, as it "
                "does beside any other key of so low a logit; pass None.",
            ),
        ),
    ),
    *_BLOCKS,
)

RAGGED_PAGED_ATTENTION = OpSpec(
    name="ragged_paged_attention",
    operands=(
        Operand("q", ("T", "Hq", "D"), FLOATS),
        _KV_PAGES,
        *BATCH_OPERANDS,
        _K,
        _V,
        Operand("sinks", ("Hq",), FLOATS, optional=True),
        *_SCALES,
        Operand("tree_mask", ("T", "W"), ("uint32",), optional=True),
    ),
    limits={"tpu": tpu_limits},
    attributes=ATTRIBUTES,
    relations=(
        Relation(
            "min(T, Hq, D, S, P) > 0",
            "q",
            "q.shape={q.shape} and page_indices.shape={page_indices.shape} "
            "must not have a dimension of 0.",
            "Give each at least one row; an idle step has num_seqs 0.",
        ),
        _NOT_EMPTY,
        _SLOTS_FIT_INT32,
        *_WRITE_RELATIONS,
        _SAME_HEAD_DIM,
        _V_AS_SAID,
        _HEADS_AS_STORED,
        Relation(
            "Hq > 0 and Hq % num_kv_heads == 0",
            "q",
            "num_q_heads={num_q_heads} must be divisible by "
            "num_kv_heads={num_kv_heads}",
            "(kv_pages.shape[2] is 2 * num_kv_heads; q.shape[1] must be a "
            "multiple of num_kv_heads).",
        ),
        Relation(
            "Hkv == num_kv_heads",
            "k",
            "k.shape={k.shape} must have num_kv_heads={num_kv_heads} heads.",
            "Give K and V with the heads that kv_pages holds.",
        ),
        Relation(
            "q.dtype == kv_pages.dtype or kv_pages.dtype.itemsize == 1",
            "q",
            "The dtype of `q` must be that of kv_pages. "
            "Got q.dtype={q.dtype}, kv_pages.dtype={kv_pages.dtype}.",
            "Cast one: q.astype(kv_pages.dtype).",
        ),
        Relation(
            "W > 0",
            "tree_mask",
            "tree_mask.shape={tree_mask.shape} must not have a dimension of 0.",
            "Give each token a bit for each token of its sequence's step.",
        ),
        *_scales_fit("num_kv_heads"),
        *_BATCH_FITS_PAGES,
        _fits_batch(
            "T",
            "q.shape[0]",
            "max_num_tokens",
            "Pad the tokens to the planner's max_num_tokens.",
        ),
    ),
)


_PADDED_HEAD_DIM = dataclasses.replace(
    _SAME_HEAD_DIM,
    rule="Dk == (max(D, v_head_dim) + 127) // 128 * 128",
    message="Q head_dim {q.shape[2]} must be that of K/V, padded to a multiple "
    "of 128. Got {kv_pages.shape[4]}.",
    remedy="Make the cache with pagemill.KVCacheSpec.",
)
_PADDED_WIDEST = dataclasses.replace(
    _WIDEST_AS_STORED,
    rule="Dk == (max(D, Dv) + 127) // 128 * 128",
    message="k.shape={k.shape} and v.shape={v.shape} must have heads of "
    "kv_pages.shape[4]={kv_pages.shape[4]}, the larger of the two padded to a "
    "multiple of 128.",
)
_PLANES = {
    "kv_pages": Operand("kv_pages", ("N", "2", "Hp", "page", "Dk"), _KV_DTYPES),
    "num_kv_heads": dataclasses.replace(_NUM_KV_HEADS, default="Hp"),
    _HEADS_AS_STORED.rule: dataclasses.replace(
        _HEADS_AS_STORED,
        rule="num_kv_heads == Hp",
        message="num_kv_heads={num_kv_heads} must be that of kv_pages, "
        "{kv_pages.shape[2]}.",
    ),
    _SAME_HEAD_DIM.rule: _PADDED_HEAD_DIM,
    _WIDEST_AS_STORED.rule: _PADDED_WIDEST,
    "C == 2 * Hkv": Relation(
        "Hp == Hkv",
        "k",
        "k.shape={k.shape} must have the {kv_pages.shape[2]} heads of "
        "kv_pages.",
        "Give K and V with the heads that kv_pages holds.",
    ),
}
_PACKED = {
    "kv_pages": Operand(
        "kv_pages", ("N", "page", "Cp", "pack", "Dk"), _KV_DTYPES
    ),
    "num_kv_heads": dataclasses.replace(
        _NUM_KV_HEADS, default="Cp * pack // 2"
    ),
    _HEADS_AS_STORED.rule: dataclasses.replace(
        _HEADS_AS_STORED,
        rule="0 <= Cp * pack - 2 * num_kv_heads < pack",
        message="num_kv_heads={num_kv_heads} must fill kv_pages.shape[2] * "
        "kv_pages.shape[3] = {kv_pages.shape[2]} * {kv_pages.shape[3]} rows, "
        "two per head.",
        remedy="Say how many heads there are where the last rows are padding.",
    ),
    _SAME_HEAD_DIM.rule: _PADDED_HEAD_DIM,
    _WIDEST_AS_STORED.rule: _PADDED_WIDEST,
    "C == 2 * Hkv": Relation(
        "0 <= Cp * pack - 2 * Hkv < pack",
        "k",
        "k.shape={k.shape} must fill the {kv_pages.shape[2]} * "
        "{kv_pages.shape[3]} rows of kv_pages, two per head.",
        "Give K and V with the heads that kv_pages holds.",
    ),
    "pack": Relation(
        "pack * kv_pages.dtype.itemsize == 4",
        "kv_pages",
        "kv_pages.shape[3]={kv_pages.shape[3]} must be the elements of "
        "{kv_pages.dtype} in 32 bits.",
        "Make the cache with pagemill.KVCacheSpec.",
    ),
}


def _limit_for(limit: Any, layout: KVLayout) -> Limits:
    """tpu_limits of pages of another layout."""
    return functools.partial(limit, layout=layout)


def for_layout(op: OpSpec, layout: KVLayout) -> OpSpec:
    """The spec of an op whose kv_pages have another layout.

    Args:
      op: one of this module, which are about KVLayout.INTERLEAVED.
      layout: that of kv_pages.
    """
    if layout is KVLayout.INTERLEAVED:
        return op
    changes: dict[str, Any] = _PLANES if layout is KVLayout.PLANES else _PACKED
    relations = [
        changes.get(r.rule, r)
        for r in op.relations
        if r is not _COMBINED_IS_EVEN and r is not _NOT_EMPTY
    ]
    relations += [changes["pack"]] if "pack" in changes else []
    limits = {
        platform: _limit_for(limit, layout)
        for platform, limit in op.limits.items()
    }
    return dataclasses.replace(
        op,
        limits=limits,
        operands=tuple(changes.get(o.name, o) for o in op.operands),
        relations=(_NOT_EMPTY_PAGES, *relations),
        attributes=tuple(changes.get(a.name, a) for a in op.attributes),
    )
