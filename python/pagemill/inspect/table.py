"""An Analysis as text."""

from __future__ import annotations

from collections.abc import Iterator

from pagemill.inspect.report import Analysis, Counts, Kernel

_SLOTS = (
    "MATMUL",
    "MATPUSH",
    "XLU",
    "VALU",
    "EUP",
    "VLOAD",
    "VSTORE",
    "SALU",
)  # fmt: skip
_KIB = 1024


def render(analysis: Analysis, *, segments: bool, min_bundles: int) -> str:
    """See Analysis.table."""
    lines = [*_head(analysis)]
    for kernel in analysis.kernels:
        lines += _kernel(kernel, segments=segments, min_bundles=min_bundles)
    return "\n".join(lines)


def _head(analysis: Analysis) -> Iterator[str]:
    yield (
        f"{analysis.tpu.name}: lowered in {analysis.lower_seconds:.1f} s, "
        f"compiled in {analysis.compile_seconds:.1f} s; "
        f"code {analysis.code_bytes / _KIB:.0f} KiB, "
        f"temporaries {analysis.temp_bytes / _KIB:.0f} KiB"
    )
    floors = analysis.floors
    for name, cycles in (
        ("HBM", floors.hbm_cycles),
        ("MXU", floors.mxu_cycles),
    ):
        if cycles is not None:
            yield f"{name} floor {cycles:,.0f} cycles"
    if analysis.simulator_error:
        yield f"not simulated: {analysis.simulator_error}"


def _kernel(
    kernel: Kernel, *, segments: bool, min_bundles: int
) -> Iterator[str]:
    total, cycles = kernel.total, kernel.simulated_cycles
    yield ""
    yield (
        f"{kernel.name}: {total.bundles} bundles, "
        f"{'not' if cycles is None else f'{cycles} cycles'} simulated, "
        f"vector spills/fills {total.vector_spills}/{total.vector_fills}, "
        f"scalar {total.scalar_spills}/{total.scalar_fills}, "
        f"copies started at {sum(total.dma_starts.values())} places, "
        f"VMEM {kernel.vmem_bytes / _KIB:.0f} KiB, "
        f"SMEM {kernel.smem_bytes / _KIB:.0f} KiB"
    )
    yield (
        f"  {'':22}{'bundles':>8}{'empty':>6}{'mxu':>7}"
        + "".join(f"{name:>8}" for name in _SLOTS)
        + f"{'DMA':>5}{'wait':>5}{'spill/fill':>12}  busiest"
    )
    for loop in kernel.loops:
        if loop.index and loop.own.bundles < min_bundles:
            continue
        indent = "  " * loop.depth
        name = f"loop {loop.index}" if loop.index else "outside"
        yield _row(indent + name, loop.own)
        for piece in loop.segments if segments else ():
            if piece.counts.bundles >= min_bundles:
                name = f"{indent} . {piece.mark:2}@{piece.first:#x}"
                yield _row(name, piece.counts)


def _row(name: str, counts: Counts) -> str:
    busy = counts.busy
    slot, use = counts.bottleneck
    spills = f"{counts.vector_spills}/{counts.vector_fills}"
    return (
        f"  {name:22}{counts.bundles:>8}{counts.empty:>6}"
        f"{counts.mxu_cycles:>7.0f}"
        + "".join(f"{busy.get(name, 0):>8.0%}" for name in _SLOTS)
        + f"{sum(counts.dma_starts.values()):>5}{counts.dma_waits:>5}"
        f"{spills:>12}  {slot} {use:.0%}"
    )
