"""The replay's loop, on a small trace written here."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from benchmarks import harness
from benchmarks.replay_loop import Prompts, Replay


def trace(folder: pathlib.Path, requests: int = 60) -> pathlib.Path:
    rng = np.random.default_rng(0)
    path = folder / "trace.jsonl"
    chains: list[list[int]] = []
    lines = []
    for number in range(requests):
        ids = list(chains[rng.integers(len(chains))]) if number % 3 else []
        ids += [number * 4 + i for i in range(int(rng.integers(1, 4)))]
        chains.append(ids)
        length = len(ids) * 512 - int(rng.integers(0, 500))
        fields = {
            "input_length": length,
            "output_length": int(rng.integers(1, 30)),
            "hash_ids": ids,
        }
        lines.append(json.dumps(fields))
    path.write_text("\n".join(lines))
    return path


def test_hits_what_an_unbounded_cache_would(tmp_path: pathlib.Path) -> None:
    # One request at a time: each finds all that came before it.
    replay = Replay(
        Prompts(trace(tmp_path)), total_num_pages=1 << 16, max_num_seqs=1
    )
    outcome = replay.run()
    assert outcome.finished == 60
    assert outcome.violations == 0
    assert outcome.ideal_hit_rate > 0.1
    assert outcome.hit_rate == outcome.ideal_hit_rate


def test_serves_all_from_a_pool_that_is_short(tmp_path: pathlib.Path) -> None:
    replay = Replay(
        Prompts(trace(tmp_path)), total_num_pages=260, pages_per_seq=260
    )
    outcome = replay.run()
    assert outcome.finished + outcome.too_long == 60
    assert outcome.violations == 0
    assert max(outcome.pages_in_use) <= 260
    assert 0 < outcome.hit_rate <= outcome.ideal_hit_rate
    assert replay.pool.num_available_pages == 260


def test_a_row_is_judged() -> None:
    good = harness.Row("a", 2.0, "us", "peer", 20.0, must=3, least_ratio=5)
    assert good.met
    assert good.ratio == 10
    assert not harness.Row("a", 4.0, "us", must=3).met
    assert not harness.Row("a", 5.0, "us", "p", 20.0, least_ratio=5).met
    assert harness.Row("a", 5.0, "us").met is None
    absent = harness.Row("a", 2.0, "us", "peer", None, must=3, least_ratio=5)
    assert absent.met is None
    assert harness.Row("a", 50.0, "%", "b", 25.0, must=50, larger=True).met
    fast = harness.Row("a", 49.0, "%", "b", 24.5, must=50, larger=True)
    assert fast.met is False
    assert fast.ratio == 2
    none = harness.Row("a", None, "us", "peer", 20.0, must=3)
    assert none.met is False
    assert none.ratio is None
    assert harness.report([good], as_json=True) == 0
    assert harness.report([harness.Row("a", 4.0, "us", must=3)], as_json=True)
