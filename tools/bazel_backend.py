"""PEP 517 backend: `pip install .` asks Bazel for //:wheel."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parent.parent


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds for the interpreter that runs this; returns the wheel's name.

    ``--config-settings bazel-args="..."`` passes arguments to the build.
    """
    del metadata_directory
    arguments = str((config_settings or {}).get("bazel-args", "")).split()
    _bazel("build", "//:wheel", *arguments)
    # cquery, not a glob: bazel-bin may hold other interpreters' wheels too.
    listed = _bazel("cquery", "--output=files", "//:wheel", *arguments)
    (wheel,) = (line for line in listed.split() if line.endswith(".whl"))
    target = pathlib.Path(wheel_directory) / pathlib.Path(wheel).name
    shutil.copyfile(_ROOT / wheel, target)
    target.chmod(0o644)
    return target.name


def build_sdist(
    sdist_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    """There is none: Bazel builds from the checkout."""
    del sdist_directory, config_settings
    raise SystemExit(
        "pagemill: there is no source distribution. Build a wheel from the "
        "checkout: pip wheel ."
    )


def _bazel(*arguments: str) -> str:
    environment = dict(os.environ, PAGEMILL_PYTHON=_interpreter())
    # pip's build isolation is about this process, not about Bazel's.
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [_ROOT / "bazelw", *arguments],
        cwd=_ROOT,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def _interpreter() -> str:
    """The one behind a virtual environment, which has the headers and pip."""
    return getattr(sys, "_base_executable", None) or sys.executable
