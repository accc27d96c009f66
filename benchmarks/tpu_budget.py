"""What the compiler may make of our TPU kernels, at most.

    tpu_budget            compiles each kernel of tpu_budget.json and compares
    tpu_budget -- --write FILE   writes what was found as the new budget

A figure above its budget is a fault: the tables of both are printed. One well
below it is named, so that the budget can follow. Figures are those of one
version of libtpu, which the file names; with another one nothing is judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from pagemill.inspect import Analysis, Kernel, analyse

BUDGET = pathlib.Path(__file__).with_name("tpu_budget.json")
# The compiler's choices hardly ever differ between runs; they may a little
# when something beside the kernel changes.
_LEEWAY = 0.01


@dataclasses.dataclass(frozen=True)
class Entry:
    """A kernel, a workload, a generation; and figures of the kernel.

    Attributes:
      kernel: what finds it in its program.
      spec: place of its spec function.
      kwargs: fields of tpu_work.Work.
      tpu: the generation.
      alone: without the operations around it, see pagemill.inspect.analyse.
      figures: each at most so large.
      table: the schedule that they came from.
    """

    kernel: str
    spec: str
    kwargs: dict[str, Any]
    tpu: str
    alone: bool
    figures: dict[str, float]
    table: list[str]

    @property
    def name(self) -> str:
        """Says which one it is."""
        shape = ", ".join(f"{k}={v}" for k, v in self.kwargs.items())
        return f"{self.spec}({shape}) on {self.tpu}"


def read(path: pathlib.Path) -> tuple[str, list[Entry]]:
    """The libtpu version of the figures, and the entries."""
    text = json.loads(path.read_text("utf-8"))
    return text["libtpu"], [Entry(**entry) for entry in text["entries"]]


def write(path: pathlib.Path, entries: list[Entry]) -> None:
    """As read reads it."""
    text = {
        "libtpu": libtpu_version(),
        "entries": [dataclasses.asdict(entry) for entry in entries],
    }
    path.write_text(json.dumps(text, indent=1) + "\n", "utf-8")


def libtpu_version() -> str:
    """Of the one that would compile."""
    return importlib.metadata.version("libtpu")


def measure(entry: Entry) -> Entry:
    """The same entry with what the kernel is now."""
    kwargs = {**entry.kwargs, "simulated": True}
    found = analyse(entry.spec, tpu=entry.tpu, kwargs=kwargs, alone=entry.alone)
    figures = _figures(found.kernel(entry.kernel))
    return dataclasses.replace(
        entry, figures=figures, table=_table(found, entry.kernel)
    )


def _figures(kernel: Kernel) -> dict[str, float]:
    loop = kernel.multiplying.own
    found: dict[str, float | None] = {
        "bundles": kernel.total.bundles,
        "loop_bundles": loop.bundles,
        "loop_mxu_cycles": loop.mxu_cycles,
        "vector_spills": kernel.total.vector_spills,
        "loop_vector_spills": loop.vector_spills,
        "vmem_bytes": kernel.vmem_bytes,
        "simulated_cycles": kernel.simulated_cycles,
    }
    return {name: value for name, value in found.items() if value is not None}


def _table(found: Analysis, pattern: str) -> list[str]:
    alone = dataclasses.replace(found, kernels=(found.kernel(pattern),))
    # The head has seconds, which are of a machine, not of a kernel.
    lines = alone.table().splitlines()
    return lines[lines.index("") + 1 :]


def faults(budget: Entry, now: Entry) -> Iterator[str]:
    """Figures of the budget that are worse now, or gone."""
    for name, most in budget.figures.items():
        value = now.figures.get(name)
        if value is None:
            yield f"{name} is gone; the budget has {most:g}"
        elif value > most * (1 + _LEEWAY):
            yield f"{name} {value:g} is above the budget's {most:g}"


def better(budget: Entry, now: Entry) -> Iterator[str]:
    """Figures that a tighter budget could hold."""
    for name, most in budget.figures.items():
        value = now.figures.get(name, most)
        if value < most * (1 - _LEEWAY):
            yield f"{name} {value:g} is below the budget's {most:g}"


def judge(budget: Entry, now: Entry) -> bool:
    """Prints what differs; whether nothing is worse."""
    worse = list(faults(budget, now))
    print(f"{'WORSE' if worse else 'ok   '} {budget.name}")
    for line in [*worse, *better(budget, now)]:
        print(f"      {line}")
    if worse:
        print("the budget's schedule:", *budget.table, sep="\n  ")
        print("the schedule now:", *now.table, sep="\n  ")
    return not worse


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 when a figure is worse than its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", type=pathlib.Path, default=BUDGET)
    parser.add_argument(
        "--write",
        type=pathlib.Path,
        metavar="FILE",
        help="write what was found, here benchmarks/tpu_budget.json",
    )
    options = parser.parse_args(arguments)
    version, budgets = read(options.budget)
    found = [measure(entry) for entry in budgets]
    if options.write is not None:
        write(options.write, found)
        return 0
    fine = [judge(*pair) for pair in zip(budgets, found, strict=True)]
    if version != libtpu_version():
        print(
            f"not judged: the budget is of libtpu {version}, this is "
            f"{libtpu_version()}"
        )
        return 0
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
