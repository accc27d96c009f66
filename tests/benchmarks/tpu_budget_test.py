"""Our TPU kernels keep to their budgets; and budgets are judged right."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import tpu_budget
from benchmarks.tpu_budget import BUDGET, Entry

VERSION, ENTRIES = tpu_budget.read(BUDGET)
MADE_UP = Entry(
    kernel="kernel",
    spec="module:spec",
    kwargs={"seqs": 1},
    tpu="v6e",
    alone=False,
    figures={"bundles": 1000},
    table=["a table"],
)


@pytest.mark.parametrize("budget", ENTRIES, ids=lambda entry: entry.name)
def test_budget(budget: Entry) -> None:
    assert budget.figures["bundles"] > 0
    if tpu_budget.libtpu_version() != VERSION:
        pytest.skip(f"the budget is of libtpu {VERSION}")
    assert tpu_budget.judge(budget, tpu_budget.measure(budget))


def now(**figures: float) -> Entry:
    return dataclasses.replace(MADE_UP, figures=figures, table=["new table"])


def test_worse_fails_and_shows_both_tables(capsys) -> None:
    assert not tpu_budget.judge(MADE_UP, now(bundles=1011))
    said = capsys.readouterr().out
    assert "bundles 1011 is above the budget's 1000" in said
    assert "a table" in said
    assert "new table" in said


def test_a_figure_that_is_gone_fails() -> None:
    assert not tpu_budget.judge(MADE_UP, now(spills=1))


def test_better_passes_and_is_named(capsys) -> None:
    assert tpu_budget.judge(MADE_UP, now(bundles=900))
    assert "bundles 900 is below" in capsys.readouterr().out


def test_within_leeway() -> None:
    assert tpu_budget.judge(MADE_UP, now(bundles=1010))


def test_zero_has_no_leeway() -> None:
    none = dataclasses.replace(MADE_UP, figures={"spills": 0})
    assert not tpu_budget.judge(none, now(spills=1))


def test_written_as_it_is_read(tmp_path) -> None:
    path = tmp_path / "budget.json"
    tpu_budget.write(path, ENTRIES)
    assert tpu_budget.read(path) == (tpu_budget.libtpu_version(), ENTRIES)
