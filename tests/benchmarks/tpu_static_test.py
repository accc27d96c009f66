"""Rows of the static benchmark, from peers that need no fetching."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks import tpu_measures, tpu_static
from benchmarks.tpu_measures import Figure, Subject
from benchmarks.tpu_work import Work

JAX = Subject(
    "JAX",
    "benchmarks.peers.jax_tpu:attend",
    "ragged_paged_attention_kernel",
    {"queries": 8},
)
WORK = Work(seqs=8)


def test_jax_decode() -> None:
    """As many cycles as its 16 fetches and four blocks can explain."""
    floor = tpu_measures.hbm_floor("v6e", dataclasses.replace(WORK, seqs=1))
    assert floor == pytest.approx(8951, abs=1)
    found = tpu_measures.cycles_per_sequence(JAX, "v6e", WORK, (8, 16))
    assert 1.5 * floor < found.value < 2.5 * floor
    steady = tpu_measures.steady_bundles(JAX, "v6e", WORK)
    assert 1000 < steady.value < found.value / 4


def test_lengths_are_ragged() -> None:
    work = Work(64, kv_len=500, kv_least=100)
    lengths = [int(work.length(seq)) for seq in range(64)]
    assert min(lengths) >= 100
    assert max(lengths) <= 500
    assert len(set(lengths)) == 64


def row(monkeypatch, ours: Figure):
    def measured(subject, *_):
        return Figure(20_000.0) if subject.name.startswith("JAX") else ours

    monkeypatch.setattr(tpu_measures, "cycles_per_sequence", measured)
    monkeypatch.setattr(
        tpu_measures, "steady_bundles", lambda *_: Figure(2_500.0)
    )
    case = next(tpu_static.decode_time())
    return case.run(case.name)


def test_below_the_floor_is_bound_by_hbm(monkeypatch) -> None:
    made = row(monkeypatch, Figure(8_000.0))
    assert made.value == 1.0
    assert made.met
    assert "bound by HBM" in made.note


def test_far_below_the_floor_is_missed(monkeypatch) -> None:
    made = row(monkeypatch, Figure(100.0))
    assert made.value is None
    assert made.met is False
    assert "not plausible" in made.note


def test_our_time_grows_with_sequences() -> None:
    """The scalars given to the simulator are those of the workload."""
    few, many = (
        tpu_measures.simulated_cycles(
            tpu_static._DECODE, "v6e", Work(seqs=seqs, kv_len=512)
        ).value
        for seqs in (2, 4)
    )
    floor = tpu_measures.hbm_floor("v6e", Work(seqs=2, kv_len=512))
    assert many - few > 0.8 * floor


def test_above_the_floor_is_judged(monkeypatch) -> None:
    assert row(monkeypatch, Figure(9_800.0)).met
    assert row(monkeypatch, Figure(9_900.0)).met is False


def test_without_a_simulation_it_gives_bundles(monkeypatch) -> None:
    made = row(monkeypatch, Figure(None, "not simulated: SIGABRT"))
    assert made.unit == "x floor, BUNDLES"
    assert made.value == pytest.approx(4 * 2500 / 8951, rel=1e-3)
    assert made.met is None
    assert "SIGABRT" in made.note


def test_what_does_not_compile_is_missed(monkeypatch) -> None:
    made = row(monkeypatch, Figure(None, "out of VMEM"))
    assert made.value is None
    assert made.met is False
    assert "out of VMEM" in made.note
