"""One primitive per op, lowered to each platform's own implementation.

``implementation=None`` leaves the choice to the platform a program is lowered
for, so that one traced function compiles for CPU and TPU alike. An explicit
one never falls back to another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from pagemill import _core
from pagemill.errors import PagemillError, UnsupportedError

Implementation = Literal["tpu", "cpu", "xla", "interpret"]
IMPLEMENTATIONS: tuple[Implementation, ...] = ("tpu", "cpu", "xla", "interpret")


@functools.cache
def register_ffi_targets() -> None:
    """Makes the native handlers known to XLA's CPU platform."""
    for name, capsule in _core.registrations().items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")


# Takes the operands, a pytree, and keyword options.
Implementer = Callable[..., Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Implementations:
    """An op's functions, all of the same signature and results."""

    cpu: Implementer
    tpu: Implementer
    xla: Implementer
    interpret: Implementer


def make_op(
    name: str,
    implementations: Implementations,
    results: Callable[..., Sequence[Any]],
) -> Implementer:
    """An op on a pytree of operands.

    Args:
      name: of the primitive.
      implementations: called with the operands and keyword options; options
        are hashable.
      results: called with the operands' avals and the options; gives the
        results' avals, made of an operand's own with ``update``, as that also
        carries how values vary over a mesh.

    Returns:
      A function of the operands, ``implementation`` and the options.
    """
    primitive = jex_core.Primitive(name)
    primitive.multiple_results = True

    def abstract(
        *leaves: Any, treedef: Any, implementation: Any, **options: Any
    ) -> list[Any]:
        del implementation
        return list(results(jax.tree.unflatten(treedef, leaves), **options))

    primitive.def_abstract_eval(abstract)
    primitive.def_impl(functools.partial(_run_compiled, primitive.bind))

    def lower(platform: Implementation) -> Any:
        def rule(
            *leaves: Any,
            treedef: Any,
            implementation: Implementation | None,
            **options: Any,
        ) -> Sequence[jax.Array]:
            chosen = implementation or platform
            if chosen in ("cpu", "tpu") and chosen != platform:
                raise UnsupportedError(_wrong_platform(name, chosen))
            run: Implementer = getattr(implementations, chosen)
            return run(jax.tree.unflatten(treedef, leaves), **options)

        return mlir.lower_fun(rule, multiple_results=True)

    mlir.register_lowering(primitive, lower("xla"))
    for platform in ("cpu", "tpu"):
        mlir.register_lowering(primitive, lower(platform), platform=platform)
    batching.primitive_batchers[primitive] = functools.partial(
        _one_by_one, primitive
    )
    ad.primitive_jvps[primitive] = functools.partial(_no_gradient, name)

    def op(
        operands: Any,
        *,
        implementation: Implementation | None,
        **options: Any,
    ) -> Sequence[jax.Array]:
        if implementation == "interpret":
            # Its callbacks are ordered, which a lowering cannot bring in.
            return _run_compiled(implementations.interpret, operands, **options)
        leaves, treedef = jax.tree.flatten(operands)
        outs: Sequence[jax.Array] = primitive.bind(
            *leaves, treedef=treedef, implementation=implementation, **options
        )
        return outs

    return op


def check_implementation(implementation: Any) -> None:
    """Refuses a name that is not one of IMPLEMENTATIONS.

    Raises:
      PagemillError: for any other value.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise PagemillError(
            f"implementation={implementation!r} must be None or one of "
            f"{', '.join(map(repr, IMPLEMENTATIONS))}. "
            "None takes the platform's own."
        )


def _run_compiled(
    run: Implementer, *operands: Any, **options: Any
) -> Sequence[jax.Array]:
    """An op called outside of jit is a program of its own."""
    with jax.disable_jit(disable=False):  # else it would come back here
        return _compiled(run, tuple(sorted(options.items())))(*operands)


@functools.cache
def _compiled(run: Implementer, options: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(functools.partial(run, **dict(options)))


def _wrong_platform(name: str, implementation: str) -> str:
    needs = {
        "tpu": "a TPU (or lowering for one ahead of time)",
        "cpu": "JAX's CPU platform",
    }[implementation]
    return (
        f"{name}: implementation={implementation!r} needs {needs}, and this "
        "program is lowered for another platform. Pass implementation=None to "
        "take the platform's own, or 'interpret' to run the TPU kernel on a "
        "CPU."
    )


def _one_by_one(
    primitive: jex_core.Primitive, operands: Any, dims: Any, **options: Any
) -> tuple[Sequence[jax.Array], list[int]]:
    """vmap: the examples run one after the other."""
    mapped = [
        operand if dim is None else jnp.moveaxis(operand, dim, 0)
        for operand, dim in zip(operands, dims, strict=True)
    ]

    def one(index: jax.Array) -> Any:
        return primitive.bind(
            *(
                operand if dim is None else operand[index]
                for operand, dim in zip(mapped, dims, strict=True)
            ),
            **options,
        )

    size = next(
        operand.shape[0]
        for operand, dim in zip(mapped, dims, strict=True)
        if dim is not None
    )
    if size == 0:
        avals = primitive.abstract_eval(
            *(
                jax.typeof(operand).update(
                    shape=operand.shape[dim is not None :]
                )
                for operand, dim in zip(mapped, dims, strict=True)
            ),
            **options,
        )[0]
        outs = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals]
    else:
        outs = jax.lax.map(one, jnp.arange(size))
    return outs, [0] * len(outs)


def _no_gradient(name: str, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        f"{name} serves inference and has no gradient. "
        "Differentiate a training attention instead, or stop_gradient its "
        "operands."
    )
