"""Writes python/pagemill/_core.pyi from the built extension.

./bazelw run //tools:update_stubs
"""

from __future__ import annotations

import os
import pathlib

from nanobind.stubgen import StubGen
from pagemill import _core


def render() -> str:
    """The stub's text."""
    generator = StubGen(module=_core)
    generator.put(_core)
    return generator.get()


if __name__ == "__main__":
    root = pathlib.Path(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    path = root / "python/pagemill/_core.pyi"
    path.write_text(render(), encoding="utf-8")
    print(f"wrote {path}")
