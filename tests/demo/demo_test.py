"""The demo: traces, reproducible values, whole runs, exit codes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest

from demo import main, traces
from demo.engine import Engine, Options
from demo.values import ModelShape


def run(arguments: list[str], capsys: Any) -> tuple[int, Any]:
    code = main.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_and_checks(dtype: str, capsys: Any) -> None:
    code, result = run(["--steps", "12", "--dtype", dtype], capsys)
    summary = result["summary"]
    assert code == 0
    assert len(result["steps"]) == summary["steps"] == 12
    assert summary["failed_checks"] == 0
    assert summary["checks"] >= 24
    assert 0 < summary["max_error"] <= summary["tolerance"]


def test_options_reach_the_op(capsys: Any) -> None:
    code, result = run(
        ["--steps", "4", "--sliding-window", "30", "--soft-cap", "20"], capsys
    )
    assert code == 0
    assert result["summary"]["max_error"] > 0


def test_table(capsys: Any) -> None:
    assert main.main(["--steps", "3"]) == 0
    text = capsys.readouterr().out
    assert "plan us" in text
    assert "all checks passed" in text


def test_a_wrong_result_fails(monkeypatch: Any, capsys: Any) -> None:
    original = Engine._timed

    def wrong(self: Engine, *arguments: Any) -> Any:
        out, seconds = original(self, *arguments)
        return out * 1.01, seconds

    monkeypatch.setattr(Engine, "_timed", wrong)
    code, result = run(["--steps", "3"], capsys)
    assert code == 1
    assert result["summary"]["failed_checks"] > 0


def test_preempts_and_serves_everything() -> None:
    requests = [traces.Request(i, 30 + i, 20) for i in range(6)]
    requests.append(traces.Request(6, 4000, 1))
    engine = Engine(
        requests,
        Options(
            total_num_pages=12,
            max_num_tokens=40,
            max_num_seqs=4,
            pages_per_seq=8,
        ),
    )
    steps = list(engine.run(500))
    assert engine.scheduler.finished == 6
    assert engine.scheduler.preemptions > 0
    assert [r.number for r in engine.scheduler.too_long] == [6]
    assert not engine.failures
    assert sum(s.failed for s in steps) == 0


def test_values_are_reproducible_and_of_unit_variance() -> None:
    model = ModelShape()
    whole = model.tokens("k", 3, 0, 200)
    np.testing.assert_array_equal(whole[50:60], model.tokens("k", 3, 50, 60))
    assert abs(whole.mean()) < 0.02
    assert abs(whole.var() - 1) < 0.02
    for other in (model.tokens("v", 3, 0, 200), model.tokens("k", 4, 0, 200)):
        assert abs(np.corrcoef(whole.ravel(), other.ravel())[0, 1]) < 0.02


def test_traces(tmp_path: pathlib.Path) -> None:
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text('{"input_length": 5, "output_length": 2, "x": []}\n\n')
    assert traces.load(jsonl) == [traces.Request(0, 5, 2)]
    table = tmp_path / "a.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,374,44\n")
    assert traces.load(table) == [traces.Request(0, 374, 44)]


def test_traces_as_other_programs_write_them(tmp_path: pathlib.Path) -> None:
    line = '{"input_length": 5, "output_length": 2, "x": "a\u2028b"}'
    for name, text in (
        ("bom.jsonl", "\ufeff" + line),
        ("crlf.jsonl", line + "\r\n" + line + "\r\n"),
        ("bom.csv", "\ufeffContextTokens,GeneratedTokens\r\n5,2\r\n"),
    ):
        path = tmp_path / name
        path.write_bytes(text.encode())
        assert traces.load(path)[0] == traces.Request(0, 5, 2)


def test_nothing_served_is_not_a_success(
    tmp_path: pathlib.Path, capsys: Any
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text('{"input_length": 99999999, "output_length": 3}')
    assert main.main(["--trace", str(path)]) == 2
    assert "no request of the trace fits 32768" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--soft-cap", "0"],
        ["--soft-cap", "nan"],
        ["--sliding-window", "3000000000"],
    ],
)
def test_bad_options_are_one_line(arguments: list[str], capsys: Any) -> None:
    assert main.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("demo: ")
    assert arguments[0][2:].replace("-", "_") in error


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.txt", "", "ends in .jsonl or .csv"),
        ("a.jsonl", "", "holds no request"),
        ("a.jsonl", '{"input_length": 5}', "a.jsonl:1: output_length=None"),
        ("a.jsonl", "{}\n{", "a.jsonl:1"),
        ("a.jsonl", "[1]", "not a JSON object"),
        ("a.jsonl", "[" * 100_000, "not JSON"),
        ("a.jsonl", '{"input_length": ' + "9" * 5000 + "}", "a.jsonl:1"),
        ("a.csv", "ContextTokens,GeneratedTokens\n1_0,2\n", "positive"),
        ("a.jsonl", '{"input_length": 0, "output_length": 1}', "positive"),
        ("a.csv", "A,B\n1,2\n", "a.csv:2: ContextTokens=None"),
    ],
)
def test_bad_traces(
    tmp_path: pathlib.Path, name: str, text: str, words: str, capsys: Any
) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main.main(["--trace", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_missing_trace(tmp_path: pathlib.Path, capsys: Any) -> None:
    assert main.main(["--trace", str(tmp_path / "none.jsonl")]) == 2
    assert "cannot be read" in capsys.readouterr().err
