"""The generated pages are what the package declares today."""

from __future__ import annotations

import pytest

from docs import tables

PAGES = tables.pages()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_is_current(path) -> None:
    assert path.read_text("utf-8") == PAGES[path], "run docs/tables.py"


def test_pages_name_every_rule() -> None:
    checks = tables.checks()
    from pagemill import CheckCode

    for code in CheckCode:
        assert f"| {code.name} |" in checks
