"""Takes the Pallas kernels out of a program, to compile them by themselves.

XLA's own operations around a kernel can end the simulator, and say nothing of
the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

_PALLAS_CALL = "pallas_call"


def kernels_alone(
    fn: Callable[..., Any], args: Any
) -> tuple[Callable[..., Any], list[Any]]:
    """A function of nothing but the kernels of ``fn(*args)``, its arguments.

    Each kernel has operands of its own. LookupError if there is none.
    """
    calls = list(_calls(jax.make_jaxpr(fn)(*args).jaxpr))
    if not calls:
        raise LookupError("it holds no Pallas kernel")

    def run(*operands: Any) -> Any:
        return [
            _bind(call, of_call)
            for call, of_call in zip(calls, operands, strict=True)
        ]

    return run, [
        [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in call.invars]
        for call in calls
    ]


def _bind(call: Any, operands: Any) -> Any:
    # The compiler names a kernel after the scope that it is called in.
    scope = str(call.source_info.name_stack).rpartition("/")[2]
    with jax.named_scope(scope or "kernel"):
        return call.primitive.bind(*operands, **call.params)


def _calls(jaxpr: Any) -> Iterator[Any]:
    """The calls of kernels in a jaxpr, also in what it calls."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == _PALLAS_CALL:
            yield equation
            continue
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=_is_jaxpr
        ):
            if _is_jaxpr(inner):
                yield from _calls(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")
