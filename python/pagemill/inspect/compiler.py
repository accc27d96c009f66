"""Runs libtpu's compiler in a child process, with its dumps on."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

from pagemill.inspect.errors import (
    CompileError,
    CompileTimeoutError,
    LibtpuMissingError,
    OutOfVmemError,
)
from pagemill.inspect.generations import Generation

_SHOWN = 600  # characters of the compiler's own words in a message
_VMEM = re.compile(r"\bvmem\b", re.IGNORECASE)
_EXHAUSTED = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|exceed", re.IGNORECASE
)
_SIZES = re.compile(r"\(size=(\d+)\) would exceed memory \(size=(\d+)\)")
# F, date, time, thread and place; then why.
_FATAL = re.compile(r"^F\d{4} \S+ +\d+ (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compile.

    Attributes:
      tpu: for which generation.
      spec: place of a spec function; None when the folder holds the program.
      kwargs: its arguments, as JSON has them.
      alone: only its kernels.
      timeout: seconds.
    """

    tpu: Generation
    spec: str | None
    kwargs: dict[str, Any]
    alone: bool
    timeout: float


class CompilerCrashError(Exception):
    """The compiler ended its process; with what it said last."""


def require_libtpu() -> None:
    """LibtpuMissingError unless it can be imported."""
    # An entry of None stands for a module that must not be found.
    if sys.modules.get("libtpu", ...) is None or (
        importlib.util.find_spec("libtpu") is None
    ):
        raise LibtpuMissingError(
            "libtpu is not installed: it is the compiler, and needs no TPU. "
            "Install it with `pip install 'pagemill[tpu]'`."
        )


def run(
    request: Request, folder: pathlib.Path, *, simulate: bool
) -> dict[str, Any]:
    """Compiles; dumps go to folder/dumps and folder/profiles.

    Returns:
      What the child found: seconds, bytes, and known figures of a spec.

    Raises:
      CompilerCrashError: its process was ended by a signal.
      CompileError: or one of its kinds.
    """
    (folder / "request.json").write_text(
        json.dumps(
            {
                "tpu": request.tpu.name,
                "spec": request.spec,
                "kwargs": request.kwargs,
                "alone": request.alone,
            }
        ),
        "utf-8",
    )
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    # The child ends itself when nobody holds the other end any more.
    child_end, own_end = os.pipe()
    try:
        done = subprocess.run(  # noqa: S603
            [sys.executable, "-m", "pagemill.inspect.child", str(folder)],
            stdin=child_end,
            env=_environment(folder, simulate=simulate),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=request.timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileTimeoutError(
            f"tpu={request.tpu.name!r}: not compiled within "
            f"timeout={request.timeout:g} s. Raise it, or give the kernel "
            "smaller blocks."
        ) from error
    finally:
        os.close(child_end)
        os.close(own_end)
    if not result.exists():
        raise CompilerCrashError(_last_words(done))
    found = json.loads(result.read_text("utf-8"))
    if "error" in found:
        raise _error(request.tpu, found)
    return found


def _environment(folder: pathlib.Path, *, simulate: bool) -> dict[str, str]:
    flags = [
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        f"--xla_jf_dump_to={_emptied(folder / 'dumps')}",
        "--xla_jf_dump_llo_text=true",
    ]
    profiles = _emptied(folder / "profiles")
    if simulate:
        flags.append(f"--xla_jf_dump_static_llo_profile_to={profiles}")
    return dict(
        os.environ,
        JAX_PLATFORMS="cpu",
        TPU_SKIP_MDS_QUERY="1",
        # Compiling holds no device: no lock is needed.
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        # The simulator can write gigabytes of warnings a minute to its logs.
        TPU_LOG_DIR="disabled",
        LIBTPU_INIT_ARGS=" ".join(filter(None, flags)),
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
    )


def _emptied(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process ended, from what it wrote."""
    fatal = _FATAL.search(done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    said = fatal[1] if fatal else "\n".join(lines[-3:])
    code = done.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"{how}: {said[:_SHOWN]}"


def _error(tpu: Generation, found: dict[str, Any]) -> CompileError:
    message = found["error"][:_SHOWN]
    what = f"tpu={tpu.name!r}: step {found['step']!r} failed: {message}"
    if not (_VMEM.search(message) and _EXHAUSTED.search(message)):
        return CompileError(what)
    error = OutOfVmemError(
        f"{what}\nThe kernel needs more VMEM than it is granted: use smaller "
        "blocks, or raise vmem_limit_bytes."
    )
    if sizes := _SIZES.search(message):
        error.needed, error.limit = int(sizes[1]), int(sizes[2])
    return error
