"""Lowers a function for a TPU that is not there.

JAX asks the abstract mesh what it lowers for, so that no TPU and no libtpu is
needed; what the compiler gets is the same to the byte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType

from pagemill.inspect.alone import kernels_alone
from pagemill.inspect.errors import CompileError
from pagemill.inspect.generations import Generation


def lower(
    fn: Callable[..., Any], args: Any, tpu: Generation, *, alone: bool = False
) -> str:
    """StableHLO text of ``fn(*args)`` for one device.

    Args:
      fn: traceable; jitted or not.
      args: a sequence of pytrees of arrays or jax.ShapeDtypeStructs; of arrays
        only shapes and dtypes count.
      tpu: what to lower for.
      alone: only its kernels, without the operations around them.

    Raises:
      CompileError: it does not trace or lower; the cause is attached.
    """
    # Only the given shapes: where an array lies must not matter.
    shapes: Any = jax.tree.map(_shape, tuple(args))
    try:
        with targeting(tpu):
            if alone:
                program, shapes = kernels_alone(fn, shapes)
            else:
                program = fn
            jitted = program if hasattr(program, "trace") else jax.jit(program)
            lowered = jitted.trace(*shapes).lower(lowering_platforms=("tpu",))
        # Kernels' names are among what is for debugging.
        return lowered.as_text(debug_info=True)
    except Exception as error:
        raise CompileError(
            f"{name_of(fn)} does not lower for tpu={tpu.name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def name_of(fn: object) -> str:
    """What to call a function in a message."""
    return getattr(fn, "__qualname__", None) or repr(fn)


def _shape(leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def targeting(tpu: Generation) -> contextlib.AbstractContextManager[Any]:
    """While it is entered, JAX takes its device for one of ``tpu``."""
    device = jax.sharding.AbstractDevice(
        device_kind=tpu.device_kind,
        num_cores=tpu.device_cores,
        platform="tpu",
    )
    mesh = AbstractMesh(
        (1,),
        ("x",),
        # Explicit ones would have every operation's sharding proved.
        axis_types=(AxisType.Auto,),
        abstract_device=device,
    )
    return jax.sharding.use_abstract_mesh(mesh)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What a spec function makes: a function, its arguments, known figures."""

    fn: Callable[..., Any]
    args: Any
    known: dict[str, Any]


def load_spec(place: str, kwargs: dict[str, Any], tpu: Generation) -> Spec:
    """Calls the spec function at ``module:function`` or ``file.py:function``.

    It returns (fn, args) or (fn, args, known): known may hold ``hbm_bytes`` and
    ``useful_macs``, and anything else that JSON can.
    """
    module, _, name = place.rpartition(":")
    found: Any = (
        _load_file(module)
        if module.endswith(".py")
        else importlib.import_module(module)
    )
    for part in name.split("."):
        found = getattr(found, part)
    with targeting(tpu):
        made = found(**kwargs)
    return Spec(made[0], made[1], dict(made[2]) if len(made) > 2 else {})


def _load_file(file: str) -> Any:
    name = "_inspected_" + pathlib.Path(file).stem
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"no module can be read from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
