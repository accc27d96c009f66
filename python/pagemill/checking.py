"""checked(): proves a batch's values inside a program, and names its faults."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pagemill import dispatch
from pagemill.batch import ARRAYS, LEVELS, STATICS, RaggedBatch, known, prove
from pagemill.check_in_program import check_code
from pagemill.dispatch import Implementation, Implementations
from pagemill.errors import PagemillError
from pagemill.validation import (
    CheckCode,
    as_window,
    require_level,
    validate,
)

_TARGET = "pagemill_checked"
# What the primitive takes, in order; the result is shaped like the first.
_OPERANDS = ("num_seqs", *(name for name in ARRAYS if name != "num_seqs"))

dispatch.register_ffi_targets()


def checked(
    batch: RaggedBatch,
    level: Literal["structure", "full"] = "full",
    *,
    sliding_window: int | None = None,
    implementation: Implementation | None = None,
) -> tuple[RaggedBatch, jax.Array]:
    """Proves a batch inside a program; what uses the result waits for that.

    On CPUs a native handler reads the arrays in place, and a wrong batch fails
    the program: jax raises its runtime error or a ValueError, with the text of
    :func:`pagemill.validate`. Elsewhere a program cannot fail: the kinds of
    fault come back as a code, and the batch as an idle step, so that nothing
    is attended to and nothing written. Hand the code, once it is on the host,
    to :func:`raise_for_code` with the batch as it was.

    Outside of jit a batch whose arrays are on the host raises here and now.
    Use the batch that is returned: a check that nothing depends on is removed
    from the program. Under ``vmap`` the examples are checked one after the
    other, and each has its code; under ``shard_map`` each shard checks what it
    has.

    Args:
      batch: the batch.
      level: as in :func:`pagemill.validate`.
      sliding_window: likewise.
      implementation: None for the platform's own, or "cpu" for the native
        handler, "xla" (and "tpu", "interpret") for the code. An explicit one
        never falls back.

    Returns:
      The batch, with ``num_seqs`` and ``distribution`` 0 and ``slot_mapping``
      -1 where the code is not 0; and the code, i32[1]: the sum of ``1 << c``
      over the kinds ``c`` of :class:`pagemill.CheckCode` that were found.

    Raises:
      PagemillError: not a batch or a level; outside of jit also wrong values
        of a batch on the host, unless ``implementation`` says otherwise.
      UnsupportedError: ``implementation`` cannot run on this platform.
    """
    dispatch.check_implementation(implementation)
    require_level(level)
    window = 0 if sliding_window is None else as_window(sliding_window)
    _require_batch("checked", batch)
    arrays = {name: getattr(batch, name) for name in ARRAYS}
    if implementation is None and all(
        known(array) for array in arrays.values() if array is not None
    ):
        prove(batch, level, window)
        return batch, jnp.zeros((1,), jnp.int32)
    operands = [
        jnp.zeros((0,), jnp.int32) if array is None else jnp.asarray(array)
        for array in (arrays[name] for name in _OPERANDS)
    ]
    (code,) = _check(
        (_vary_with_all(operands[0], operands[1:]), *operands[1:]),
        implementation=implementation,
        level=level,
        sliding_window=window,
        **{name: getattr(batch, name) for name in STATICS},
    )
    return _idle_unless(batch, code), code


def raise_for_code(
    code: Any, batch: RaggedBatch, *, sliding_window: int | None = None
) -> None:
    """Raises what :func:`pagemill.validate` says of a batch with a code.

    Args:
      code: from :func:`checked`, i32[1] or an int; reading it waits for the
        program.
      batch: the batch that was given to :func:`checked`, not the one it
        returned.
      sliding_window: as it was given there.

    Raises:
      PagemillError: the batch is wrong; with every violation.
      RuntimeError: the code is not 0, and the batch is fine on the host.
    """
    _require_batch("raise_for_code", batch)
    bits = _as_bits(code)
    if bits == 0:
        return
    validate(batch, sliding_window=sliding_window)
    kinds = ", ".join(c.name for c in CheckCode if bits >> c & 1)
    raise RuntimeError(
        f"code={bits} ({kinds or 'no kind of check'}) says that the batch was "
        "wrong on the device, but it is right on the host. Pass the batch that "
        "was given to checked(), not the one it returned; if it is, its arrays "
        "changed after they were sent, or while they were."
    )


def _require_batch(name: str, batch: Any) -> None:
    if not isinstance(batch, RaggedBatch):
        raise PagemillError(
            f"batch is a {type(batch).__name__}, not a RaggedBatch. "
            f"Make one of the bare arrays for {name}()."
        )


def _as_bits(code: Any) -> int:
    if isinstance(code, jax.core.Tracer):
        raise PagemillError(
            "code is traced: inside jit its value is not known yet. Return it "
            "from the program, and call raise_for_code on the host."
        )
    bits = np.asarray(code)
    if bits.size != 1 or bits.dtype.kind not in "iu":
        raise PagemillError(
            f"code has the shape {bits.shape} and the dtype {bits.dtype}; it "
            "must be one integer, as checked() returns it. Of several steps or "
            "shards pass each code with its own batch."
        )
    return int(bits.reshape(()))


def _vary_with_all(first: jax.Array, others: list[jax.Array]) -> jax.Array:
    """The first operand, over a mesh as varied as they all are.

    Under shard_map a result counts as varying where the first operand does,
    but the code differs wherever any operand does. Sums take up what their
    terms say, in every version of jax, and XLA drops the zeros.
    """
    for other in others:
        if other.size:
            first = first + 0 * other.reshape(-1)[:1]
    return first


def _idle_unless(batch: RaggedBatch, code: jax.Array) -> RaggedBatch:
    """The batch, or where the code is not 0 one that does nothing."""
    changes: dict[str, Any] = {
        name: jnp.where(code == 0, array, jnp.int32(idle))
        for name, idle in (
            ("num_seqs", 0),
            ("distribution", 0),
            ("slot_mapping", -1),
        )
        if (array := getattr(batch, name)) is not None
    }
    return dataclasses.replace(batch, **changes)


def _check_cpu(
    operands: tuple[jax.Array, ...],
    *,
    page_size: int,
    total_num_pages: int,
    max_num_tokens: int,
    level: str,
    sliding_window: int,
) -> tuple[jax.Array, ...]:
    """The native handler, whose code is 0 or which fails the program."""
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((1,), jnp.int32))
    code = call(
        *operands,
        page_size=np.int64(page_size),
        total_num_pages=np.int64(total_num_pages),
        max_num_tokens=np.int64(max_num_tokens),
        full=np.bool_(LEVELS[level] == LEVELS["full"]),
        sliding_window=np.int64(sliding_window),
    )
    return (code,)


def _check_in_program(
    operands: tuple[jax.Array, ...], **options: Any
) -> tuple[jax.Array, ...]:
    return (check_code(*operands, **options),)


_check = dispatch.make_op(
    _TARGET,
    Implementations(
        cpu=_check_cpu,
        tpu=_check_in_program,
        xla=_check_in_program,
        interpret=_check_in_program,
    ),
    lambda operands, **_: (operands[0],),
)
