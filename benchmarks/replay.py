"""Replays a request trace through planner, pool and validator.

Prints the steps, what one costs (planner, pool and validate(level="full")
together), the prefix cache's hit rate against an unbounded one's, page use over
time, and the violations found, of which there must be none.
"""

from __future__ import annotations

import pathlib
import statistics
import sys

import numpy as np

from benchmarks import harness
from benchmarks.replay_loop import Outcome, Prompts, Replay, series
from demo import traces


def main(arguments: list[str]) -> int:
    """Exit code 0; 1 after a violation; 2 for a trace that can't be read."""
    parser = harness.parser(__doc__)
    parser.add_argument("--trace", type=pathlib.Path, required=True)
    parser.add_argument("--steps", type=int, help="stop after so many")
    parser.add_argument(
        "--pages", type=int, default=1 << 20, help="default: %(default)s"
    )
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--max-num-tokens", type=int, default=2048)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    options = parser.parse_args(arguments)
    try:
        prompts = Prompts(options.trace)
    except traces.TraceError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    outcome = Replay(
        prompts,
        total_num_pages=options.pages,
        page_size=options.page_size,
        max_num_tokens=options.max_num_tokens,
        max_num_seqs=options.max_num_seqs,
    ).run(options.steps)
    rows = [
        harness.Row("step, median", statistics.median(outcome.step_us), "us"),
        harness.Row(
            "step, p99", float(np.percentile(outcome.step_us, 99)), "us"
        ),
        harness.Row("violations", outcome.violations, "", must=0),
    ]
    code = harness.report(rows, as_json=options.json, **_facts(outcome))
    if not options.json:
        for name, value in _facts(outcome).items():
            print(f"{name}: {value}")
    return code


def _facts(outcome: Outcome) -> dict[str, object]:
    return {
        "steps": len(outcome.step_us),
        "tokens": outcome.tokens,
        "finished_requests": outcome.finished,
        "preempted_requests": outcome.preempted,
        "skipped_too_long": outcome.too_long,
        "median_sequences": statistics.median(outcome.sequences),
        "hit_rate": outcome.hit_rate,
        "ideal_hit_rate": outcome.ideal_hit_rate,
        "pages_in_use": list(series(outcome.pages_in_use)),
        "violations": outcome.violations,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
