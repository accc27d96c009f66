"""What the demo shows: a progress bar, a table, a summary, or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from demo.engine import TOLERANCE, Engine, Step

try:
    from rich.progress import Progress
except ImportError:
    _new_bar: Callable[..., Any] | None = None
else:
    _new_bar = Progress

_SHOWN_STEPS = 20


@contextlib.contextmanager
def progress(total: int, *, quiet: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, where rich is installed; else nothing."""
    if quiet or _new_bar is None or not sys.stdout.isatty():
        yield lambda: None
        return
    with _new_bar(transient=True) as bar:
        task = bar.add_task("steps", total=total)
        yield lambda: bar.advance(task)


def summarise(
    steps: list[Step], engine: Engine, *, seconds: float
) -> dict[str, Any]:
    """Totals and medians of a run."""
    scheduler, options = engine.scheduler, engine.options
    summary: dict[str, Any] = {
        "steps": len(steps),
        "finished_requests": scheduler.finished,
        "preempted_requests": scheduler.preemptions,
        "skipped_too_long": len(scheduler.too_long),
        "tokens": sum(s.tokens for s in steps),
        "seconds": seconds,
        "platform": jax.default_backend(),
        "dtype": options.dtype,
        "checks": sum(s.checks for s in steps),
        "failed_checks": sum(s.failed for s in steps) + len(engine.failures),
        "failures": engine.failures,
        "max_error": max((s.max_error for s in steps), default=0.0),
        "tolerance": TOLERANCE[options.dtype],
        "median_plan_us": _median(s.plan_us for s in steps),
        "median_validate_us": _median(s.validate_us for s in steps),
        "median_attention_ms": _median(s.attention_ms for s in steps),
    }
    if options.peer:
        own = sum(s.attention_ms for s in steps)
        peer = sum(s.peer_ms or 0.0 for s in steps)
        summary["peer"] = options.peer
        summary["peer_attention_ms"] = peer
        summary["attention_ms"] = own
        summary["ratio_to_peer"] = own / peer if peer else None
    return summary


def print_json(steps: list[Step], summary: dict[str, Any]) -> None:
    """{"steps": [...], "summary": {...}} on one line each."""
    rows = [dataclasses.asdict(step) for step in steps]
    print(json.dumps({"steps": rows, "summary": summary}))


def print_table(steps: list[Step], summary: dict[str, Any]) -> None:
    """Some of the steps, evenly spaced, and the summary."""
    print(
        "  step  sequences  tokens  pages in use  plan us  validate us"
        "  attention ms"
    )
    stride = max(-(-len(steps) // _SHOWN_STEPS), 1)
    for step in steps[::stride]:
        print(
            f"{step.step:6}  {step.sequences:9}  {step.tokens:6}"
            f"  {step.pages:12}  {step.plan_us:7.1f}"
            f"  {step.validate_us:11.1f}  {step.attention_ms:12.2f}"
        )
    print()
    for name, value in summary.items():
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(f"{name.replace('_', ' '):>20}: {shown}")
    verdict = "all checks passed"
    if summary["failed_checks"]:
        verdict = f"{summary['failed_checks']} checks FAILED"
    print(f"\n{verdict}")


def _median(values: Iterator[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
