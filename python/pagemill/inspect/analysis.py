"""From a function to what its schedule says."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pagemill.inspect import compiler
from pagemill.inspect.compiler import CompilerCrashError, Request
from pagemill.inspect.dumps import read_dumps
from pagemill.inspect.errors import CompileError
from pagemill.inspect.generations import Generation, generation
from pagemill.inspect.lowering import lower
from pagemill.inspect.report import Analysis, Floors

_NO_SIMULATOR = "libtpu's simulator does not know this generation"
_NOT_ASKED = "not asked for"


def analyse(
    fn: Callable[..., Any] | str,
    args: Any = (),
    tpu: str = "v6e",
    *,
    kwargs: Mapping[str, Any] | None = None,
    simulate: bool = True,
    alone: bool = False,
    hbm_bytes: float | None = None,
    useful_macs: float | None = None,
    timeout: float = 600,
    keep: str | pathlib.Path | None = None,
) -> Analysis:
    """Compiles a function that holds Pallas kernels, and reads the schedule.

    No TPU is needed, only libtpu. A callable is lowered here and now, with
    whatever it closes over; a spec function is loaded in the child process.

        print(pagemill.inspect.analyse(fn, (q, k, v), "v6e"))

    Args:
      fn: the function; or the place of a spec function that makes it and its
        arguments, ``"module:function"`` or ``"file.py:function"``.
      args: its arguments, arrays or jax.ShapeDtypeStructs in any pytree.
      tpu: v4, v5e, v5p, v6e or 7x.
      kwargs: keyword arguments of a spec function, as JSON can hold them.
      simulate: whether to run libtpu's simulator too.
      alone: compile the kernels without the operations around them, which can
        end the simulator and say nothing of a kernel.
      hbm_bytes: bytes that have to cross HBM, for Analysis.floors.
      useful_macs: multiply-accumulates that have to be done, likewise.
      timeout: seconds for the compiler.
      keep: a folder in which the compiler's dumps stay.

    Returns:
      An Analysis; ``print`` shows it as a table.

    Raises:
      UnknownTpuError: no such generation.
      LibtpuMissingError: the compiler is not installed.
      OutOfVmemError: the kernel does not fit.
      CompileTimeoutError: the timeout has passed.
      CompileError: it does not trace, lower or compile.
    """
    target = generation(tpu)
    compiler.require_libtpu()
    with _folder(keep) as folder:
        known: dict[str, Any] = {}
        if not isinstance(fn, str):
            start = time.perf_counter()
            text = lower(fn, args, target, alone=alone)
            known["lower_seconds"] = time.perf_counter() - start
            (folder / "program.mlir").write_text(text, "utf-8")
        spec = fn if isinstance(fn, str) else None
        request = Request(target, spec, dict(kwargs or {}), alone, timeout)
        found, error = _compile(request, folder, simulate=simulate)
        found = known | found
        made = found.get("known", {})
        given = {"hbm_bytes": hbm_bytes, "useful_macs": useful_macs}
        given = {n: v for n, v in given.items() if v is not None}
        return Analysis(
            target,
            read_dumps(folder / "dumps", folder / "profiles", target),
            found["lower_seconds"],
            found["compile_seconds"],
            found["code_bytes"],
            found["temp_bytes"],
            error,
            _floors(target, made | given),
            made,
        )


@contextlib.contextmanager
def _folder(keep: str | pathlib.Path | None) -> Iterator[pathlib.Path]:
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="pagemill_inspect_") as made:
            yield pathlib.Path(made)
    else:
        folder = pathlib.Path(keep).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def _compile(
    request: Request, folder: pathlib.Path, *, simulate: bool
) -> tuple[dict[str, Any], str]:
    """What the child found, and why nothing was simulated."""
    reason = "" if simulate else _NOT_ASKED
    if simulate and not request.tpu.simulates:
        reason = _NO_SIMULATOR
    if not reason:
        try:
            return compiler.run(request, folder, simulate=True), ""
        except CompilerCrashError as error:
            reason = str(error)
    try:
        return compiler.run(request, folder, simulate=False), reason
    except CompilerCrashError as error:
        raise CompileError(
            f"tpu={request.tpu.name!r}: the compiler ended its process with "
            f"{error}"
        ) from error


def _floors(tpu: Generation, known: Mapping[str, Any]) -> Floors:
    num_bytes, macs = known.get("hbm_bytes"), known.get("useful_macs")
    return Floors(
        None if num_bytes is None else num_bytes / tpu.hbm_bytes_per_cycle,
        None if macs is None else macs / tpu.macs_per_cycle,
    )
