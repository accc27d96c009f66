"""Few cases of a grid that is too large to test whole."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_CANDIDATES = 40

Choice = tuple[tuple[str, int], ...]  # of some dimensions: name, place


def covering(
    grid: Mapping[str, Sequence[Any]], strength: int, seed: int = 0
) -> list[dict[str, Any]]:
    """Cases that show any values of any `strength` dimensions together.

    Args:
      grid: the values of each dimension.
      strength: 2 for pairs, 3 for triples.
      seed: of the choice; the same one gives the same cases.
    """
    rng = random.Random(seed)
    places = {name: range(len(values)) for name, values in grid.items()}
    # A dict, not a set: its order is always the same.
    missing = dict.fromkeys(
        choice
        for names in itertools.combinations(grid, strength)
        for choice in itertools.product(
            *([(name, place) for place in places[name]] for name in names)
        )
    )
    cases = []
    while missing:
        wanted = dict(next(iter(missing)))
        candidates = [
            {name: rng.choice(places[name]) for name in grid} | wanted
            for _ in range(_CANDIDATES)
        ]
        best = max(
            candidates,
            key=lambda case: sum(c in missing for c in shown(case, strength)),
        )
        for choice in shown(best, strength):
            missing.pop(choice, None)
        cases.append({name: grid[name][i] for name, i in best.items()})
    return cases


def shown(case: Mapping[str, Any], strength: int) -> Iterator[Choice]:
    """Every choice of `strength` dimensions that a case shows."""
    return itertools.combinations(case.items(), strength)
