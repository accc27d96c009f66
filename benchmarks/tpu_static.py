"""Our TPU kernels against public ones, by schedule and simulator; no TPU runs.

    tpu_static -- --op ragged_paged_attention [--tpu v6e] [--row TEXT] [--json]

A figure says what the compiler made of a kernel, never what a TPU measured. A
simulated time below the HBM floor is the simulator missing waits: it is
reported as 1, bound by HBM. Where the simulator cannot run, a row gives bundles
in its place, and is not judged.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator

from pagemill.inspect import GENERATIONS, generation

from benchmarks import harness, tpu_kernels
from benchmarks import tpu_measures as measures
from benchmarks.harness import Row
from benchmarks.peers import jax_tpu, tpu_inference
from benchmarks.tpu_measures import Figure, Subject
from benchmarks.tpu_work import Work

_OURS = "benchmarks.tpu_kernels"
_DECODE = Subject(
    "decode", f"{_OURS}:decode", tpu_kernels.DECODE, shared_by={"v5p": 2}
)
_PREFILL = Subject("prefill", f"{_OURS}:prefill", tpu_kernels.PREFILL)
_FP8 = "float8_e4m3fn"
# Sequences of two simulations: their difference is free of start and end. JAX's
# fill its largest block of queries.
_COUNTS = (8, 16)
_JAX_COUNTS = (32, 64)
_LONG = Work(seqs=64, kv_len=2048)
_CHUNK = Work(seqs=1, q_len=512, kv_len=2048)
# Its fastest copies take 0.89 of the floor's time, or less where a core takes
# the other's share too; far below, the simulator did not run what was meant.
_LEAST_PLAUSIBLE = 0.8
_NO_V3 = "tpu-inference is absent"


def _jax(queries: int) -> Subject:
    return Subject(
        f"JAX bq{queries}",
        "benchmarks.peers.jax_tpu:attend",
        jax_tpu.KERNEL,
        {"queries": queries},
    )


def _v3(tpu: str, keys: int, pattern: str) -> Subject:
    return Subject(
        "v3",
        "benchmarks.peers.tpu_inference:attend",
        pattern,
        {"tpu": tpu, "keys": keys},
    )


def _has_v3() -> bool:
    return importlib.util.find_spec("tpu_inference") is not None


@dataclasses.dataclass(frozen=True)
class Case:
    """A row that can be computed.

    Attributes:
      name: of the row; its last word is the generation.
      tpu: the generation.
      run: makes the row, given the name.
    """

    name: str
    tpu: str
    run: Callable[[str], Row]


def decode_time() -> Iterator[Case]:
    """Simulated cycles per sequence over the HBM floor."""
    for tpu, page_size, kv_dtype, must, aim in (
        ("v6e", 128, "bfloat16", 1.10, 1.02),
        ("v6e", 64, "bfloat16", 1.10, 1.02),
        ("v5p", 128, "bfloat16", 1.10, 1.02),
        ("v5p", 64, "bfloat16", 1.10, 1.02),
        ("v6e", 16, "bfloat16", 1.15, 1.05),
        ("v6e", 128, _FP8, 1.25, 1.05),
    ):
        work = dataclasses.replace(
            _LONG, page_size=page_size, kv_dtype=kv_dtype
        )
        kind = "" if kv_dtype == "bfloat16" else ", 8-bit KV"
        yield Case(
            f"decode kv 2048{kind}, page {page_size}, {tpu}",
            tpu,
            functools.partial(_decode_time, tpu, work, must, aim),
        )


def _decode_time(
    tpu: str, work: Work, must: float, aim: float, name: str
) -> Row:
    floor = measures.hbm_floor(tpu, dataclasses.replace(work, seqs=1))
    ours = measures.cycles_per_sequence(_DECODE, tpu, work, _COUNTS)
    peer_name, peer = "JAX", Figure(None, "its fp8 does not simulate")
    if work.kv_dtype == "bfloat16":
        peer_name, peer = _fastest_jax(
            lambda one: measures.cycles_per_sequence(
                one, tpu, work, _JAX_COUNTS
            )
        )
    notes = [f"HBM floor {floor:.0f} cycles", ours.note]
    value, unit, judged = ours.value, "x floor, simulated", True
    if value is None and ours.note.startswith("not simulated"):
        steady = measures.steady_bundles(_DECODE, tpu, work)
        unit, judged = "x floor, BUNDLES", False
        if steady.value is not None:
            value = steady.value * work.kv_len / 512
    least = _LEAST_PLAUSIBLE * floor / generation(tpu).cores
    if value is not None and value < least and judged:
        notes.append(f"{value / floor:.2f} is not plausible")
        value = None
    elif value is not None and value < floor:
        notes.append(f"{value / floor:.2f}: bound by HBM")
    notes.append(f"{peer_name}: {peer.note}" if peer.note else "")
    return Row(
        name,
        None if value is None else max(value / floor, 1.0),
        unit,
        peer_name,
        None if peer.value is None else max(peer.value / floor, 1.0),
        must if judged else None,
        aim,
        note="; ".join(filter(None, notes)),
    )


def _fastest_jax(measure: Callable[[Subject], Figure]) -> tuple[str, Figure]:
    """JAX at the better of its tuned table's query block and the least."""
    found = {one.name: measure(one) for one in map(_jax, (8, 32))}
    able = {n: f for n, f in found.items() if f.value is not None}
    if not able:
        return next(iter(found.items()))
    name = min(able, key=lambda n: able[n].value or 0.0)
    return name, able[name]


def decode_ragged() -> Iterator[Case]:
    """Short sequences of many lengths: start and end of each count."""
    tpu, work = "v6e", Work(64, kv_len=500, kv_least=100, page_size=16)

    def run(name: str) -> Row:
        ours = measures.simulated_cycles(_DECODE, tpu, work)
        peer_name, peer = _fastest_jax(
            lambda one: measures.simulated_cycles(one, tpu, work)
        )
        half = peer.value and peer.value / 2
        return Row(
            name,
            ours.value,
            "cycles, simulated",
            peer_name,
            peer.value,
            must=half,
            aim=peer.value and peer.value * 0.35,
            note="; ".join(filter(None, [ours.note, peer.note])),
        )

    yield Case(f"decode of 64, kv 100 to 500, page 16, {tpu}", tpu, run)


def decode_bundles() -> Iterator[Case]:
    """Compute and DMA issue, which share the instruction stream."""
    work = dataclasses.replace(_LONG, page_size=16)
    for tpu in ("v6e", "7x", "v5p"):
        yield Case(
            f"decode bundles per 512 KV, page 16, {tpu}",
            tpu,
            functools.partial(_decode_bundles, tpu, work),
        )
    for tpu, page_size, kv_dtype, must, aim in (
        ("v6e", 16, "bfloat16", 0.45, 0.3),
        ("7x", 128, _FP8, 1.3, 1.0),
    ):
        kind = "" if kv_dtype == "bfloat16" else ", 8-bit KV"
        work = dataclasses.replace(
            _LONG, page_size=page_size, kv_dtype=kv_dtype
        )
        yield Case(
            f"decode bundles over HBM floor{kind}, page {page_size}, {tpu}",
            tpu,
            functools.partial(_slack, tpu, work, must, aim),
        )


def _decode_bundles(tpu: str, work: Work, name: str) -> Row:
    ours = measures.steady_bundles(_DECODE, tpu, work)
    peer = _v3_figure(measures.steady_bundles, tpu, work)
    return Row(
        name,
        ours.value,
        "bundles",
        "v3",
        peer.value,
        must=peer.value and 0.8 * peer.value,
        aim=peer.value and 0.55 * peer.value,
        least_ratio=1 / 0.8,
        note=f"{ours.note}; v3: {peer.note}",
    )


def _slack(tpu: str, work: Work, must: float, aim: float, name: str) -> Row:
    """Below 1 is what is left to do other things in while HBM binds."""
    floor = measures.hbm_floor(tpu, dataclasses.replace(work, seqs=1))
    ours = measures.steady_bundles(_DECODE, tpu, work)
    peer = _v3_figure(measures.steady_bundles, tpu, work)
    scale = work.kv_len / 512 / floor
    notes = [ours.note, f"v3: {peer.note}"]
    if ours.value is not None and ours.value * scale < 1:
        notes.append("bound by HBM")
    return Row(
        name,
        ours.value and ours.value * scale,
        "x floor, bundles",
        "v3",
        peer.value and peer.value * scale,
        must,
        aim,
        note="; ".join(filter(None, notes)),
    )


def _v3_figure(
    measure: Callable[[Subject, str, Work], Figure], tpu: str, work: Work
) -> Figure:
    if not _has_v3():
        return Figure(None, _NO_V3)
    decodes = work.q_len == 1
    pattern = tpu_inference.DECODE if decodes else tpu_inference.PREFILL
    return measure(_v3(tpu, 2048 if decodes else 512, pattern), tpu, work)


def prefill() -> Iterator[Case]:
    """The unmasked inner loop: how much of the MXU it keeps busy."""
    for tpu, must, aim in (
        ("v6e", 46, 60),
        ("7x", 48, 66),
        ("v5e", 92, 98),
        ("v5p", 92, 98),
    ):
        yield Case(
            f"prefill, MXU peak, {tpu}",
            tpu,
            functools.partial(_prefill, tpu, must, aim),
        )
    yield Case("prefill, spilled registers, v6e", "v6e", _spills)
    yield Case("compile time of one call, v6e", "v6e", _compile_time)


def _prefill(tpu: str, must: float, aim: float, name: str) -> Row:
    ours = measures.mxu_percent(_PREFILL, tpu, _CHUNK)
    theirs = measures.mxu_percent(_jax(128), tpu, _CHUNK)
    v3 = _v3_figure(measures.mxu_percent, tpu, _CHUNK)
    return Row(
        name,
        ours.value,
        "%",
        "v3",
        v3.value,
        must,
        aim,
        larger=True,
        note=f"{ours.note}; v3: {v3.note}; {_said('JAX bq128', theirs)}",
    )


def _spills(name: str) -> Row:
    ours = measures.spilled(_PREFILL, "v6e", _CHUNK)
    theirs = measures.spilled(_jax(128), "v6e", _CHUNK)
    v3 = _v3_figure(measures.spilled, "v6e", _CHUNK)
    return Row(
        name,
        ours.value,
        "registers",
        "v3",
        v3.value,
        must=3000,
        aim=300,
        note=f"{ours.note}; {_said('JAX bq128', theirs)}",
    )


def _compile_time(name: str) -> Row:
    ours = measures.compile_seconds(_PREFILL, "v6e", _CHUNK)
    theirs = measures.compile_seconds(_jax(128), "v6e", _CHUNK)
    return Row(
        name, ours.value, "s", "JAX bq128", theirs.value, 20, 5, note=ours.note
    )


def _said(name: str, figure: Figure) -> str:
    value = "absent" if figure.value is None else f"{figure.value:.1f}"
    return f"{name}: {value} {figure.note}".strip()


_OPS = {
    "ragged_paged_attention": (
        decode_time,
        decode_ragged,
        decode_bundles,
        prefill,
    ),
}


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 when a row misses its must."""
    parser = harness.parser(__doc__)
    parser.add_argument("--op", choices=_OPS, default=next(iter(_OPS)))
    parser.add_argument("--tpu", choices=GENERATIONS, help="its rows only")
    parser.add_argument("--row", dest="only", help="the same as --only")
    options = parser.parse_args(arguments)
    rows = []
    for case in (case for part in _OPS[options.op] for case in part()):
        if options.only not in case.name:
            continue
        if options.tpu not in {None, case.tpu}:
            continue
        row = case.run(case.name)
        rows.append(row)
        # Seconds to minutes each: shown as they come.
        said = f"{row.name}: {row.value} {row.unit}, {row.peer_name} {row.peer}"
        print(said, file=sys.stderr, flush=True)
    return harness.report(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
