"""How planning and proving grow with sequences and pages, as a plot."""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pagemill

from benchmarks import batches, harness

_SEQUENCES = (16, 64, 256, 1024, 4096, 16384)
_WIDTHS = (16, 64, 256, 1024)


def measure() -> dict[str, list[tuple[int, float]]]:
    """Lines of (size, microseconds)."""
    lines: dict[str, list[tuple[int, float]]] = {}

    def add(line: str, size: int, call: Callable[[], Any]) -> None:
        calls = max(20, min(400, 400_000 // size))
        lines.setdefault(line, []).append(
            (size, harness.median_us(call, calls, warm_up=20))
        )

    for seqs in _SEQUENCES:
        add("decode step, by sequences", seqs, batches.SteadyDecode(seqs, 128))
        batch = batches.decode_batch(seqs, 64)
        check = functools.partial(pagemill.validate, batch)
        add("validate full, rows of 64 pages, by sequences", seqs, check)
    for width in _WIDTHS:
        batch = batches.decode_batch(256, width)
        check = functools.partial(pagemill.validate, batch)
        add("validate full, 256 rows, by pages of a row", width, check)
    return lines


def plot(lines: dict[str, list[tuple[int, float]]], path: pathlib.Path) -> None:
    """Draws the lines on logarithmic axes."""
    mpl: Any = importlib.import_module("matplotlib")
    mpl.use("svg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")

    mpl.rcParams["svg.hashsalt"] = "pagemill"
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("sequences, or pages of a row")
    axes.set_ylabel("microseconds, median")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str]) -> int:
    """Prints the points; draws them where told."""
    parser = harness.parser(__doc__)
    parser.add_argument("--plot", type=pathlib.Path, help="an .svg to write")
    options = parser.parse_args(arguments)
    lines = measure()
    rows = [
        harness.Row(f"{name}: {size}", us, "us")
        for name, points in lines.items()
        for size, us in points
        if options.only in name
    ]
    if options.plot:
        plot(lines, options.plot)
    return harness.report(rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
