"""Runs a request trace through Pagemill on this machine.

A continuous-batching loop over one attention layer of a small model: requests
are admitted, planned in C++, validated, their keys and values written into
pages, attention computed, sampled rows compared with dense float64 attention.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import time

import jax
import pagemill

from demo import report, traces
from demo.engine import TOLERANCE, Engine, Options


def main(arguments: list[str]) -> int:
    """Exit code 0, or 1 if a check failed, or 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (
        traces.TraceError,
        pagemill.PagemillError,
        jax.errors.JaxRuntimeError,
    ) as error:
        print(f"demo: {error}", file=sys.stderr)
    except BrokenPipeError:  # The reader of our output has seen enough.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    return 2


def _run(options: argparse.Namespace) -> int:
    if options.trace:
        requests = traces.load(options.trace)
    else:
        requests = traces.generate(512, options.seed)
    engine = Engine(
        requests,
        Options(
            dtype=options.dtype,
            sliding_window=options.sliding_window,
            soft_cap=options.soft_cap,
            implementation=options.implementation,
            peer=options.compare,
        ),
    )
    start = time.perf_counter()
    steps = []
    with report.progress(options.steps, quiet=options.json) as advance:
        for step in engine.run(options.steps):
            steps.append(step)
            advance()
    summary = report.summarise(
        steps, engine, seconds=time.perf_counter() - start
    )
    if not summary["tokens"]:
        capacity = engine.scheduler.capacity
        message = f"no request of the trace fits {capacity} tokens."
        raise traces.TraceError(message)
    if options.json:
        report.print_json(steps, summary)
    else:
        report.print_table(steps, summary)
    return 0 if summary["failed_checks"] == 0 else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--trace",
        type=pathlib.Path,
        metavar="FILE",
        help="requests from FILE: .jsonl with input_length and output_length, "
        "or .csv with ContextTokens and GeneratedTokens (default: drawn)",
    )
    parser.add_argument(
        "--steps", type=_positive, default=160, help="default: %(default)s"
    )
    parser.add_argument(
        "--seed", type=_natural, default=0, help="of drawn requests"
    )
    parser.add_argument("--dtype", choices=sorted(TOLERANCE), default="float32")
    parser.add_argument("--sliding-window", type=_positive, metavar="KEYS")
    parser.add_argument("--soft-cap", type=float, metavar="CAP")
    parser.add_argument(
        "--implementation",
        choices=["cpu", "xla"],
        help="default: the platform's own",
    )
    parser.add_argument(
        "--compare",
        choices=["cpu", "xla"],
        help="time this implementation beside, step by step",
    )
    parser.add_argument(
        "--json", action="store_true", help="all steps and the summary as JSON"
    )
    return parser


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} must not be negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
