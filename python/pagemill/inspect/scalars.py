"""Tells the simulator what a kernel's prefetched scalars hold.

The simulator reads scalars that a copy brought as 0, and an operand of one
element as 42. A constant added to every load makes them what a workload needs,
and the compiler still has to treat them as unknown; it costs a scalar
instruction a load.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl

# What an operand of one element reads as; observed, not documented.
_ONE_ELEMENT = 42

Value = Callable[..., Any] | int


class _Offset:
    """A scalar ref whose loads are ``value(*index)`` more than they were."""

    def __init__(self, ref: Any, value: Value) -> None:
        self._ref = ref
        self._value = value

    def __getitem__(self, index: Any) -> Any:
        loaded = self._ref[index]
        wide = loaded.astype("int32") if loaded.dtype.itemsize < 4 else loaded
        indices = index if isinstance(index, tuple) else (index,)
        value = self._value(*indices) if callable(self._value) else self._value
        size = functools.reduce(lambda a, b: a * b, self._ref.shape, 1)
        return wide + (value - _ONE_ELEMENT if size == 1 else value)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._ref[index] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ref, name)


def simulated_scalars(
    fn: Callable[..., Any], values: Sequence[Value | None], kernel: str = ""
) -> Callable[..., Any]:
    """``fn``, with its kernels' prefetched scalars as the simulator needs them.

        fn = simulated_scalars(decode, [lambda seq: 2048, lambda slot: slot])
        analyse(fn, args, "v6e").kernel().simulated_cycles

    For the simulator alone: run, it computes nonsense.

    Args:
      fn: calls ``pl.pallas_call`` while it is traced.
      values: of the first scalar-prefetch operands, in order: a function of
        the index a kernel loads, an integer for every index, or None to leave
        the operand alone.
      kernel: only kernels whose name this regular expression finds.
    """

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        with _patched(values, kernel):
            return fn(*args, **kwargs)

    return traced


@contextlib.contextmanager
def _patched(values: Sequence[Value | None], pattern: str) -> Iterator[None]:
    original = pl.pallas_call

    def pallas_call(body: Any, *args: Any, **kwargs: Any) -> Any:
        name = kwargs.get("name") or getattr(body, "__name__", "")
        scalars = getattr(kwargs.get("grid_spec"), "num_scalar_prefetch", 0)
        if scalars and re.search(pattern, name or ""):
            body = _wrapped(body, values[:scalars])
        return original(body, *args, **kwargs)

    # A jitted function inside may be in JAX's caches, traced without this; and
    # what is traced now must not stay there.
    jax.clear_caches()
    pl.pallas_call = pallas_call  # type: ignore[assignment]
    try:
        yield
    finally:
        pl.pallas_call = original
        jax.clear_caches()


def _wrapped(body: Any, values: Sequence[Value | None]) -> Any:
    @functools.wraps(body)
    def wrapped(*refs: Any, **kwargs: Any) -> Any:
        changed = [
            ref if value is None else _Offset(ref, value)
            for ref, value in zip(refs, values, strict=False)
        ]
        return body(*changed, *refs[len(values) :], **kwargs)

    return wrapped
