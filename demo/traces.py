"""Requests: from a public trace file, or drawn from published shapes."""

from __future__ import annotations

import csv
import dataclasses
import json
import pathlib
from collections.abc import Iterator

import numpy as np


@dataclasses.dataclass(frozen=True)
class Request:
    """One request of a trace; lengths in tokens.

    Attributes:
      number: its place in the trace, from 0.
      prompt: tokens of the prompt.
      output: tokens to generate.
    """

    number: int
    prompt: int
    output: int


_MAX_DIGITS = 19  # of a length that int64 holds


class TraceError(ValueError):
    """A trace that cannot be read; names the file, the line and the remedy."""


def load(path: pathlib.Path) -> list[Request]:
    """Reads a trace.

    ``.jsonl``: ``input_length`` and ``output_length`` in each line.
    ``.csv``: columns ``ContextTokens`` and ``GeneratedTokens``.

    Raises:
      TraceError: the file or a line of it is not of these forms.
    """
    readers = {
        ".jsonl": (_json_lines, "input_length", "output_length"),
        ".csv": (_csv_lines, "ContextTokens", "GeneratedTokens"),
    }
    if path.suffix not in readers:
        raise TraceError(
            f"{path}: a trace ends in .jsonl or .csv, not {path.suffix!r}."
        )
    lines, prompt, output = readers[path.suffix]
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    requests = [
        Request(
            i,
            _length(fields, prompt, path, line),
            _length(fields, output, path, line),
        )
        for i, (line, fields) in enumerate(lines(text, path))
    ]
    if not requests:
        raise TraceError(f"{path}: holds no request.")
    return requests


def _json_lines(
    text: str, path: pathlib.Path
) -> Iterator[tuple[int, dict[str, object]]]:
    # Not splitlines: JSON strings may hold other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise TraceError(f"{path}:{number}: not a JSON object.")
        yield number, fields


def _csv_lines(
    text: str, path: pathlib.Path
) -> Iterator[tuple[int, dict[str, object]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        for row in reader:
            yield reader.line_num, dict(row)
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: {error}") from None


def _length(
    fields: dict[str, object], name: str, path: pathlib.Path, line: int
) -> int:
    value = fields.get(name)
    text = str(value)
    plain = text.isascii() and text.isdigit() and len(text) < _MAX_DIGITS
    length = int(text) if plain else 0
    if length < 1:
        raise TraceError(
            f"{path}:{line}: {name}={value!r} must be a positive integer."
        )
    return length


def generate(count: int, seed: int) -> list[Request]:
    """Draws requests with the shape of public conversation traces.

    Prompt and output lengths of such traces are close to log-normal: many
    short ones and a long tail. The medians here (256 and 32) are smaller, so
    that requests finish within a short run.
    """
    rng = np.random.default_rng(seed)
    prompts = np.exp(rng.normal(np.log(256), 1.0, count))
    outputs = np.exp(rng.normal(np.log(32), 0.8, count))
    return [
        Request(i, int(np.clip(p, 1, 8192)), int(np.clip(o, 1, 512)))
        for i, (p, o) in enumerate(zip(prompts, outputs, strict=True))
    ]
