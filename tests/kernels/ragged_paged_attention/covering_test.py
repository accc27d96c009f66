"""The choice of cases of a large grid."""

from __future__ import annotations

import math

import pytest

from tests.kernels.ragged_paged_attention.covering import covering, shown

GRID = {"a": range(5), "b": range(4), "c": range(3), "d": "xy"}


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_every_combination_is_shown(strength: int) -> None:
    cases = covering(GRID, strength)
    found = {choice for case in cases for choice in shown(case, strength)}
    whole = covering(GRID, len(GRID))
    expected = {choice for case in whole for choice in shown(case, strength)}
    assert len(whole) == math.prod(map(len, GRID.values()))
    assert found == expected
    assert len(cases) < len(whole)


def test_a_seed_chooses_always_the_same() -> None:
    assert covering(GRID, 2, seed=1) == covering(GRID, 2, seed=1)
    assert covering(GRID, 2, seed=1) != covering(GRID, 2, seed=2)
