"""The committed stub is what the extension says."""

from __future__ import annotations

import pathlib

from pagemill import _core

from tools import update_stubs


def test_stub_is_current() -> None:
    committed = pathlib.Path("python/pagemill/_core.pyi").read_text("utf-8")
    assert committed == update_stubs.render(), (
        "stale: ./bazelw run //tools:update_stubs"
    )


def test_stub_names_everything_public() -> None:
    committed = pathlib.Path("python/pagemill/_core.pyi").read_text("utf-8")
    for name in dir(_core):
        if not name.startswith("_"):
            assert name in committed
