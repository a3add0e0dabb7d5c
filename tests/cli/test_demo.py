import dataclasses
import json
import sys

import pytest
import torch

from memopt.cli import demo_run
from memopt.cli.demo_run import Case, gradient_error
from memopt.report import load

TINY = Case("tiny GPT", "gpt2:tiny", {"layers": 3}, batch=8, inputs={"sequence": 32}, optimizer=torch.optim.AdamW)


@pytest.fixture(autouse=True)
def _one_tiny_case(monkeypatch):
    monkeypatch.setattr(sys.modules["memopt.cli.demo"], "CASES", (TINY,))


def test_demo_passes_and_says_where_the_reports_are(run, folder):
    result = run("demo", "--report-dir", "out")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert result.stdout.splitlines()[-1].startswith("PASSED: every measured peak is within its budget")
    assert "eager" in result.stdout
    assert len(list((folder / "out").glob("*.html"))) == 2
    for path in (folder / "out").glob("*.json"):
        report = load(path)
        assert report.budget_bytes is not None
        assert report.peak_bytes <= report.budget_bytes


def test_json_is_all_that_stdout_holds(run):
    result = run("demo", "--format", "json", "--seed", "3")
    rows = json.loads(result.stdout)["rows"]
    assert [row["verdict"] for row in rows] == ["baseline", "ok", "ok"]
    assert all(row["measured_bytes"] <= row["budget_bytes"] for row in rows[1:])
    assert all(row["gradient_error"] <= demo_run.LARGEST_ERROR for row in rows[1:])
    assert "PASSED" in result.stderr


def test_a_share_that_cannot_be_met_is_said_and_the_least_is_tried(run, monkeypatch):
    monkeypatch.setattr(demo_run, "SHARES", (0.1,))
    result = run("demo", "--format", "json")
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)["rows"][1]
    assert row["setting"] == "least (10% cannot be met)"
    assert row["measured_bytes"] <= row["budget_bytes"]


def test_wrong_gradients_are_exit_code_4(run, monkeypatch):
    monkeypatch.setattr(demo_run, "gradient_error", lambda expected, found: 0.5)
    result = run("demo")
    assert result.exit_code == 4
    assert result.stdout.splitlines()[-1].startswith("FAILED: gradients differ")


def test_a_broken_budget_is_exit_code_1(run, monkeypatch):
    real = demo_run.measure_steps

    def heavier(model, *rest):
        peak, seconds = real(model, *rest)
        return peak * (2 if "Compiled" in type(model).__name__ else 1), seconds

    monkeypatch.setattr(demo_run, "measure_steps", heavier)
    result = run("demo")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("FAILED: a measured peak is above its budget")


def test_cases_of_the_demo_build():
    for case in demo_run.CASES:
        model, inputs = dataclasses.replace(case, batch=1).build()
        assert model.training
        assert "labels" in inputs


def test_gradient_error_is_relative_and_misses_nothing():
    ones = {"w": torch.ones(3), "zero": torch.zeros(2)}
    assert gradient_error(ones, ones) == 0
    assert gradient_error(ones, {**ones, "w": torch.tensor([1.0, 1.0, 1.5])}) == 0.5
    assert gradient_error(ones, {"w": torch.ones(3)}) == float("inf")
    assert gradient_error(ones, {**ones, "w": torch.tensor([1.0, float("nan"), 1.0])}) == float("inf")
