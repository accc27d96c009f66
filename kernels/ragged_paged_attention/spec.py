"""What ragged paged attention accepts: one table for all implementations.

The first sentence of a message is the one that users of the public kernels
search for, where there is one; the remedy is ours.
"""

from __future__ import annotations

from pagemill.batch import BATCH_OPERANDS
from pagemill.kernels.ragged_paged_attention.limits import tpu_limits
from pagemill.spec import FLOATS, INT32, Attribute, Operand, OpSpec, Relation

_KV_PAGES = Operand("kv_pages", ("N", "page", "C", "Dk"), FLOATS)
_K = Operand("k", ("T", "Hkv", "D"), FLOATS, optional=True)
_V = Operand("v", ("T", "Hkv", "D"), FLOATS, optional=True)
_COMBINED_IS_EVEN = Relation(
    "C % 2 == 0",
    "kv_pages",
    "num_combined_kv_heads={num_combined_kv_heads} must be even: "
    "kv_pages.shape[2] holds K at even and V at odd heads.",
    "Interleave K and V: kv_pages[n, slot, 2*h] is K, [2*h + 1] is V.",
)


def _same_dtype(name: str) -> Relation:
    return Relation(
        f"{name}.dtype == kv_pages.dtype",
        name,
        f"The dtype of `{name}` must be that of kv_pages. "
        f"Got {name}.dtype={{{name}.dtype}}, "
        "kv_pages.dtype={kv_pages.dtype}.",
        f"Cast one: {name}.astype(kv_pages.dtype).",
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
    _same_dtype("k"),
    _same_dtype("v"),
)

_NOT_EMPTY = Relation(
    "min(N, page, C, Dk) > 0",
    "kv_pages",
    "kv_pages.shape={kv_pages.shape} must not have a dimension of 0.",
    "Make at least one page.",
)
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
        Operand("k", ("T", "Hkv", "Dk"), FLOATS),
        Operand("v", ("T", "Hkv", "Dk"), FLOATS),
        Operand("slot_mapping", ("T",), INT32),
    ),
    relations=(
        _NOT_EMPTY,
        _SLOTS_FIT_INT32,
        *_WRITE_RELATIONS,
        Relation(
            "C == 2 * Hkv",
            "k",
            "k.shape={k.shape} must have num_combined_kv_heads / 2 = "
            "{kv_pages.shape[2]} / 2 heads.",
            "Give K and V with the heads that kv_pages holds.",
        ),
        *_BATCH_FITS_PAGES,
    ),
)

COPY_PAGES = OpSpec(
    name="copy_pages",
    operands=(_KV_PAGES, Operand("copies", ("n", "2"), INT32)),
    relations=(_NOT_EMPTY,),
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
        for name in ("num_queries_per_block", "vmem_limit_bytes")
    ),
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
    ),
    derived=(("num_kv_heads", "C // 2"),),
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
        Relation(
            "D == Dk",
            "q",
            "Q head_dim {q.shape[2]} must be the same as that of K/V "
            "{kv_pages.shape[3]}.",
            "Give q and kv_pages one head_dim.",
        ),
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
        _same_dtype("q"),
        *_BATCH_FITS_PAGES,
        _fits_batch(
            "T",
            "q.shape[0]",
            "max_num_tokens",
            "Pad the tokens to the planner's max_num_tokens.",
        ),
    ),
)
