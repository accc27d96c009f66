"""Planning, proving and page keeping against peers, in one process.

Each figure is a median; peers take turns with Pagemill. A peer whose packages
are absent is reported as absent.
"""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pagemill

from benchmarks import batches, harness
from benchmarks.harness import Row, interleaved_us
from benchmarks.peers import numpy_planner, numpy_validators
from benchmarks.replay_loop import Prompts, Replay

try:
    from benchmarks.peers import numba_validators
except ImportError:  # not among this run's packages
    numba_validators = None  # type: ignore[assignment]
try:
    from benchmarks.peers import vllm_core

    vllm_core.load()
except ImportError:
    vllm_core = None  # type: ignore[assignment]
try:
    from benchmarks.peers import sglang_jax_pool
except ImportError:
    sglang_jax_pool = None  # type: ignore[assignment]

_VLLM, _SGLANG = "vLLM", "SGLang-JAX"
_POOL_BENCHMARK = "csrc/core/pool/pool_benchmark"
_ABSENT = "the peer's sources are absent"


def decode_steps() -> Iterator[Row]:
    """A persistent batch, one token each: planned, committed, retired."""
    for seqs, must, aim in ((256, 4, 2), (1024, 8, 4), (8192, 60, 30)):
        ours = batches.SteadyDecode(seqs)
        calls: list[Any] = [("ours", ours, 400)]
        if vllm_core is not None and seqs <= 1024:
            calls.append((_VLLM, _vllm_decode(seqs), 8))
        found = interleaved_us(calls)
        ours.pool.audit()
        yield Row(
            f"decode step, {seqs} sequences",
            found["ours"],
            "us",
            _VLLM,
            found.get(_VLLM),
            must,
            aim,
            note="" if _VLLM in found or seqs > 1024 else _ABSENT,
        )


def _vllm_decode(seqs: int) -> Callable[[], Any]:
    """Its scheduler's part alone: no array is written for a worker yet."""
    manager = vllm_core.make_manager(seqs * 80, 4096, caching=True)
    requests = [
        vllm_core.make_request(str(i), list(range(1000)), caching=True)
        for i in range(seqs)
    ]
    for request in requests:
        vllm_core.admit(manager, request)

    def step() -> None:
        vllm_core.append(requests, 7)
        vllm_core.decode_step(manager, requests)

    return step


def rebuild() -> Iterator[Row]:
    """All rows change hands, so that every array is written from scratch."""
    seqs, width = 1024, 512
    # Written, both: pages of untouched zeros would all be one in memory.
    table = np.arange(seqs * width, dtype=np.int32)
    copy = table.copy()
    memcpy = functools.partial(
        ctypes.memmove, copy.ctypes.data, table.ctypes.data, table.nbytes
    )
    theirs = numpy_planner.NumpyPlanner(
        max_num_tokens=seqs,
        max_num_seqs=seqs,
        pages_per_seq=width,
        page_size=batches.PAGE_SIZE,
    )
    ours = batches.Rebuild(seqs, width)
    theirs.page_table[:, : width // 2] = 1
    theirs.lengths[:] = width // 2 * batches.PAGE_SIZE - 64
    rows, ones = np.arange(seqs), np.ones(seqs, np.int32)

    def rebuild_theirs() -> None:
        theirs.lengths[:] = width // 2 * batches.PAGE_SIZE - 64
        theirs.plan(rows, ones)

    found = interleaved_us(
        [
            ("ours", ours, 8),
            ("memcpy", memcpy, 20),
            ("np.copyto", lambda: np.copyto(copy, table), 20),
            ("NumPy", rebuild_theirs, 8),
        ],
        rounds=4,
    )
    yield Row(
        f"dense rebuild, {seqs} x {width}",
        found["ours"],
        "us",
        "NumPy",
        found["NumPy"],
        must=1.3 * found["memcpy"] + 4,
        aim=1.1 * found["memcpy"] + 2,
        note=f"memcpy of the table {found['memcpy']:.1f} us, "
        f"np.copyto {found['np.copyto']:.1f} us",
    )


def validation() -> Iterator[Row]:
    """Every check of a good batch; and of one with 100 offenders."""
    for seqs, width, must, aim, calls in (
        (256, 64, 8, 5, 300),
        (1024, 512, 130, 90, 60),
        (8192, 512, 1600, 1000, 8),
    ):
        batch = batches.decode_batch(seqs, width)
        bad = batches.with_faults(batch, 100)
        assert _holds(batch)
        assert not _holds(bad)
        peers = _validators(batch)
        found = interleaved_us(
            [
                ("ours", functools.partial(_holds, batch), calls),
                ("bad", functools.partial(_holds, bad), calls),
                *((name, call, max(calls // 6, 3)) for name, call in peers),
            ]
        )
        name = f"validate full, {seqs} x {width}"
        yield Row(
            name,
            found["ours"],
            "us",
            "NumPy",
            found["NumPy"],
            must,
            aim,
            least_ratio=5,
        )
        yield Row(
            f"{name}, against numba",
            found["ours"],
            "us",
            "numba",
            found.get("numba"),
            least_ratio=1,
            note="" if "numba" in found else _ABSENT,
        )
        yield Row(
            f"{name}, 100 offenders",
            found["bad"],
            "us",
            "accepting",
            found["ours"],
            must=1.5 * found["ours"],
            aim=1.2 * found["ours"],
        )


def _holds(batch: pagemill.RaggedBatch) -> bool:
    """As a caller checks that wants to go on either way."""
    try:
        pagemill.validate(batch)
    except pagemill.PagemillError:
        return False
    return True


def _validators(
    batch: pagemill.RaggedBatch,
) -> Iterator[tuple[str, Callable[[], Any]]]:
    arrays = (batch.kv_lens, batch.page_indices, batch.cu_q_lens)
    sizes = {
        "page_size": batch.page_size,
        "total_num_pages": batch.total_num_pages,
        "max_num_tokens": batch.max_num_tokens,
    }
    seqs = batch.max_num_seqs
    by_numpy = numpy_validators.NumpyValidator(
        max_num_seqs=seqs, pages_per_seq=batch.pages_per_seq, **sizes
    )
    yield "NumPy", lambda: by_numpy(*arrays, seqs)
    if numba_validators is not None:
        by_numba = numba_validators.NumbaValidator(**sizes)
        yield "numba", lambda: by_numba(*arrays, seqs)


def pool() -> Iterator[Row]:
    """Pages: taken and released, evicted, keyed and looked up."""
    found = _cpp_benchmark()
    peers: dict[str, float] = {}
    if vllm_core is not None:
        peers = _vllm_pool()
    for name, key, must, aim in (
        ("allocate + free a page, LIFO", "TakeAndRelease", 5, 2),
        ("allocate + free a page, evicting", "EvictAndRelease", 25, 12),
        ("key a 16-token page, SHA-256 chain", "KeyPages", 150, 90),
        ("look a page up", "LookUp", 20, 8),
    ):
        yield Row(
            name,
            found[key],
            "ns",
            _VLLM,
            peers.get(key),
            must,
            aim,
            note="" if peers else _ABSENT,
        )
    yield from _free_request()


def _cpp_benchmark() -> dict[str, float]:
    """Nanoseconds a page of the C++ benchmark's cases."""
    program = next(
        path
        for folder in sys.path
        if (path := pathlib.Path(folder, _POOL_BENCHMARK)).is_file()
    )
    text = subprocess.run(  # noqa: S603
        [
            str(program),
            "--benchmark_format=json",
            "--benchmark_repetitions=5",
            "--benchmark_min_time=0.1",
        ],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {
        case["run_name"]: 1e9 / case["items_per_second"]
        for case in json.loads(text)["benchmarks"]
        if case.get("aggregate_name") == "median"
    }


def _vllm_pool() -> dict[str, float]:
    """Its figures for the same, nanoseconds a block."""
    many, prompt = 4096, list(range(50_000))
    blocks = len(prompt) // vllm_core.BLOCK_SIZE
    plain = vllm_core.make_pool(250_000, caching=False)
    manager = vllm_core.make_manager(2 * blocks, 60_000, caching=True)
    request = vllm_core.make_request("a", prompt, caching=True)
    vllm_core.admit(manager, request)
    again = vllm_core.make_request("b", prompt, caching=True)
    us = interleaved_us(
        [
            ("cycle", lambda: vllm_core.cycle(plain, many), 5),
            ("hash", lambda: vllm_core.hash_blocks(prompt), 5),
            ("lookup", lambda: vllm_core.lookup(manager, again), 5),
        ],
        rounds=3,
    )
    cycle = us["cycle"] / many * 1e3
    return {
        "TakeAndRelease": cycle,
        "EvictAndRelease": cycle,  # without its work for a hash
        "KeyPages": us["hash"] / blocks * 1e3,
        "LookUp": us["lookup"] / blocks * 1e3,
    }


def _free_request() -> Iterator[Row]:
    """Requests of 1,024 tokens in a pool of 250,000 pages."""
    tokens, pages, requests = 1024, 250_000, 300
    held = pagemill.PagePool(pages, batches.PAGE_SIZE)
    planner = pagemill.Planner(held, tokens, 1, 64)
    waiting = [held.open() for _ in range(requests)]
    for seq in waiting:
        planner.plan([(seq, tokens)])
    planner.commit()
    calls: list[Any] = [("ours", lambda: held.close(waiting.pop()), 50)]
    if sglang_jax_pool is not None:
        allocator = sglang_jax_pool.make_allocator(pages, batches.PAGE_SIZE)
        slots: list[Any] = [
            sglang_jax_pool.alloc(allocator, tokens) for _ in range(40)
        ]
        calls.append(
            (_SGLANG, lambda: sglang_jax_pool.free(allocator, slots.pop()), 4)
        )
    found = interleaved_us(calls, rounds=5)
    yield Row(
        "free 1,024 tokens, pool of 250,000 pages",
        found["ours"],
        "us",
        _SGLANG,
        found.get(_SGLANG),
        1,
        0.5,
        note="" if _SGLANG in found else _ABSENT,
    )


def whole_loop(trace: pathlib.Path | None, steps: int) -> Iterator[Row]:
    """Planner, pool and validate(full) over a request trace."""
    name = "replay of a trace, step of 2,048 tokens"
    if trace is None:
        print(f"{name}: left out, no --trace given", file=sys.stderr)
        return
    outcome = Replay(Prompts(trace), total_num_pages=1 << 20).run(steps)
    yield Row(name, statistics.median(outcome.step_us), "us", must=50, aim=20)
    yield Row(f"{name}, violations", outcome.violations, "", must=0)


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 when a row misses its must."""
    parser = harness.parser(__doc__)
    parser.add_argument("--trace", type=pathlib.Path, help="for the replay row")
    parser.add_argument("--steps", type=int, default=6000)
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for part in (
        decode_steps(),
        rebuild(),
        validation(),
        pool(),
        whole_loop(options.trace, options.steps),
    ):
        for row in part:
            if options.only in row.name:
                rows.append(row)
                if not options.json:
                    print(row.name, "...", file=sys.stderr)
    return harness.report(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
