"""tpu-inference's kernel compiles as its project runs it."""

from __future__ import annotations

import pytest

from benchmarks import tpu_measures
from benchmarks.peers import tpu_inference
from benchmarks.tpu_measures import Subject
from benchmarks.tpu_work import Work


def v3(tpu: str, pattern: str) -> Subject:
    place = "benchmarks.peers.tpu_inference:attend"
    return Subject("v3", place, pattern, {"tpu": tpu, "keys": 2048})


@pytest.mark.parametrize("tpu", ["v6e", "7x"])
def test_decode(tpu: str) -> None:
    """Its loop over blocks starts the copies of the next one."""
    work = Work(seqs=64, page_size=16)
    subject = v3(tpu, tpu_inference.DECODE)
    kernel = tpu_measures.compiled(subject, tpu, work).kernel(subject.pattern)
    assert "bkv_2048" in kernel.name
    copies = 2048 // work.page_size
    most = max(
        sum(piece.counts.dma_starts.values())
        for loop in kernel.loops
        for piece in loop.segments
    )
    assert most >= copies
    figure = tpu_measures.steady_bundles(subject, tpu, work)
    compute = kernel.multiplying.own.bundles / 4
    assert figure.value > compute + copies / 4


def test_prefill() -> None:
    work = Work(seqs=1, q_len=512)
    subject = v3("v6e", tpu_inference.PREFILL)
    figure = tpu_measures.mxu_percent(subject, "v6e", work)
    assert 20 < figure.value < 40
    assert "cap 50 %" in figure.note
