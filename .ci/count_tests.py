"""Prints "PASSED FAILED" over the junit files of the test targets given.

A target without one (it did not build, crashed or timed out) is one failure.
"""

from __future__ import annotations

import pathlib
import sys
import xml.etree.ElementTree as ET


def count(path: pathlib.Path) -> tuple[int, int]:
    """Test cases of one junit file: (passed, failed)."""
    if not path.exists():
        return 0, 1
    cases = list(ET.parse(path).getroot().iter("testcase"))  # noqa: S314
    skipped = sum(case.find("skipped") is not None for case in cases)
    failed = sum(
        case.find("failure") is not None or case.find("error") is not None
        for case in cases
    )
    return len(cases) - failed - skipped, failed


def main(labels: list[str]) -> None:
    """Adds up all targets, which are given as //package:name."""
    totals = [0, 0]
    for label in labels:
        folder = label.removeprefix("//").replace(":", "/")
        found = count(pathlib.Path("bazel-testlogs") / folder / "test.xml")
        totals = [a + b for a, b in zip(totals, found, strict=True)]
    print(*totals)


if __name__ == "__main__":
    main(sys.argv[1:])
