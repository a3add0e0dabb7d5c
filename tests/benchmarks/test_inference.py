"""The table of inference: rows are on file when they have ended, and stay there if the run is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import inference, render

ROOT = Path(inference.__file__).resolve().parents[1]
TINY = ("--tiny", "--repeats", "2")


@pytest.fixture
def table(tmp_path, monkeypatch, capsys):
    def run(*options):
        path = tmp_path / "inference.json"
        monkeypatch.setattr("sys.argv", ["inference.py", *TINY, "--json", str(path), *options])
        assert inference.main() == 0
        return json.loads(path.read_text()), capsys.readouterr().out

    return run


@pytest.mark.long
def test_rows_have_their_figures_in_the_order_given(table):
    rows = ("--rows", "eager,memopt/aten,memopt-freeze/static,memopt/static:1B", "--jobs", "3")
    result, said = table("--models", "resnet50,bert_base", *rows)
    assert [(row["model"], row["row"]) for row in result["rows"]] == [
        ("resnet50", "eager"), ("bert_base", "eager"), ("resnet50", "memopt/aten"), ("bert_base", "memopt/aten"),
        ("resnet50", "memopt-freeze/static"), ("resnet50", "memopt/static:1B"), ("bert_base", "memopt/static:1B"),
    ]  # fmt: skip
    *whole, refused, last = result["rows"]
    for row in whole:
        assert row["seconds"] >= row["fastest_seconds"] > 0 and row["error"] < 1e-5 and row["first_call_seconds"] > 0
    assert whole[4]["backend"] == "static" and "batch norms were folded" in whole[4]["notes"][0]
    assert "refused: the minimum is" in refused["error_text"] and "refused: the minimum is" in last["error_text"]
    assert len(said.splitlines()) == 1 + len(result["rows"])
    shown = render.inference_table({**result, "driver": "none"}).splitlines()
    assert len({line.count("|") for line in shown[2:]}) == 1


@pytest.mark.long
def test_a_run_that_is_killed_keeps_what_was_timed(tmp_path):
    path = tmp_path / "inference.json"
    rows = ("--models", "bert_base", "--rows", "eager,memopt/aten,compile,freezing", "--jobs", "2")
    command = [sys.executable, "-u", "benchmarks/inference.py", *TINY, *rows, "--json", str(path)]
    with subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]  # the head and two rows
        process.kill()
    kept = [row["row"] for row in json.loads(path.read_text())["rows"]]
    assert len(kept) >= 2 and all(any(row in line for line in lines) for row in kept[:2])
    left, until = b"?", time.monotonic() + 100
    while left and time.monotonic() < until:  # their files are below it, which their command lines name
        left = subprocess.run(["pgrep", "-f", f"python.*{tmp_path}"], capture_output=True, check=False).stdout
        time.sleep(0.1)
    assert not left


def test_what_has_no_time_says_so(table):
    result, said = table("--models", "bert_base", "--rows", "eager,memopt", "--seconds", "0")
    late = "not ready within the 0 s that there were for everything"
    assert [row["error_text"] for row in result["rows"]] == [late, late] and said.count(f"  {late}") == 2


def test_without_a_reference_every_row_says_so(table):
    result, said = table("--only", "gpt2:eager", "--device", "nowhere")
    assert "no results to compare with" in result["rows"][0]["error_text"] and "gpt2 reference: " in said
