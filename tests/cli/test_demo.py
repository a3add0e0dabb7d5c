import dataclasses
import importlib
import json

import pytest
import torch

import memopt
from memopt.cli import demo_run
from memopt.cli.demo_run import Case, Row, Verdict, gradient_error
from memopt.report import load

TINY = Case("tiny GPT", "gpt2:tiny", {"layers": 1}, batch=8, inputs={"sequence": 32}, optimizer=torch.optim.AdamW)


@pytest.fixture(autouse=True)
def _one_tiny_case(monkeypatch):
    monkeypatch.setattr(importlib.import_module("memopt.cli.demo"), "CASES", (TINY,))


@pytest.mark.long
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


def test_each_row_is_said_before_it_is_measured_and_when_it_is(run, measured):
    measured("ok")
    lines = run("demo").stdout.splitlines()
    first = lines.index("tiny GPT, eager: measuring")
    assert lines[first + 1].startswith("  eager: peak 1.00 kB, step 500 ms, baseline (")
    assert lines[first + 2] == "tiny GPT, 60%: planning and measuring"
    assert lines[first + 3].startswith("  60%: peak 590 B of 600 B, step 250 ms, ok (")
    assert any(line.startswith("Next:  memopt plan") for line in lines)
    assert "measuring" not in run("demo", "-q").stdout


def test_a_share_that_cannot_be_met_is_said_and_the_least_is_tried(run, monkeypatch):
    monkeypatch.setattr(demo_run, "SHARES", (0.1,))
    result = run("demo", "--format", "json")
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)["rows"][1]
    assert row["setting"] == "least (10% cannot be met)"
    assert row["measured_bytes"] <= row["budget_bytes"]


def test_a_gpu_s_batches_are_halved_until_plain_training_fits():
    case = dataclasses.replace(TINY, label="{batch} rows")
    model, inputs = case.build()
    needed = memopt.estimate(model, inputs, optimizer=torch.optim.AdamW(model.parameters())).total
    (large,), (small,) = demo_run.gpu_cases(2 * needed, (case,)), demo_run.gpu_cases(needed, (case,))
    assert (large.batch, large.label) == (8, "8 rows") and small.batch < 8
    assert small.label == f"{small.batch} rows"


def test_without_a_gpu_the_gpu_s_demo_is_refused_in_a_line(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("demo", "--gpu")
    assert result.exit_code == 2 and result.stderr.startswith("error: demo --gpu: torch sees no CUDA device")


@pytest.mark.gpu
@pytest.mark.whole_process  # a budget in bytes is of all that it reserves
def test_on_a_gpu_budgets_hold_for_what_is_reserved(run, folder, monkeypatch):
    case = dataclasses.replace(TINY, label="{batch}", device="cuda", engine="inductor", options={"dropout": 0.0})
    monkeypatch.setattr(demo_run.gpu_cases, "__defaults__", ((case,),))
    result = run("demo", "--gpu", "--report-dir", "out")
    assert result.exit_code == 0, result.stdout + result.stderr
    assert len(list((folder / "out").glob("*-gpu-*.html"))) == 2


def rows(verdict: Verdict) -> list[Row]:
    return [
        Row("tiny", "eager", None, None, 1000, 0.5, None, "baseline"),
        Row("tiny", "60%", 600, 590, 590, 0.25, 0.0, verdict),
    ]


@pytest.fixture
def measured(monkeypatch):
    """Have the demo measure the given verdict, without running anything."""

    def choose(verdict):
        monkeypatch.setattr(
            importlib.import_module("memopt.cli.demo"), "run_case", lambda case, seed, folder: iter(rows(verdict))
        )

    return choose


def test_json_is_all_that_stdout_holds(run, measured):
    measured("ok")
    result = run("demo", "--format", "json", "--seed", "3")
    document = json.loads(result.stdout)
    assert document["rows"] == [dataclasses.asdict(row) for row in rows("ok")]
    assert document["seed"] == 3
    assert result.stderr.startswith("PASSED: ")


@pytest.mark.parametrize(
    ("verdict", "code", "last"),
    [
        ("ok", 0, "PASSED: "),
        ("over budget", 1, "FAILED: a measured peak is above its budget"),
        ("numbers differ", 4, "FAILED: gradients differ"),
    ],
)
def test_exit_code_and_last_line_follow_the_verdicts(run, measured, verdict, code, last):
    measured(verdict)
    result = run("demo")
    assert result.exit_code == code
    assert result.stdout.splitlines()[-1].startswith(last)
    assert verdict in result.stdout
    assert "59%" in result.stdout


@pytest.mark.parametrize(
    ("error", "peak", "verdict"),
    [(0.0, 600, "ok"), (0.0, 601, "over budget"), (1e-3, 100, "numbers differ"), (float("nan"), 100, "numbers differ")],
)
def test_verdict_needs_both_the_budget_and_the_numbers(error, peak, verdict):
    assert demo_run.judge(error, peak, 600) == verdict


@pytest.mark.parametrize(
    ("error", "noise", "verdict"),
    [(0.1, 0.06, "ok"), (0.1, 0.04, "numbers differ"), (1e-5, 0.0, "ok"), (0.1, float("inf"), "numbers differ")],
)
def test_an_error_is_one_beyond_what_rounding_makes_of_the_model_itself(error, noise, verdict):
    assert demo_run.judge(error, 100, 600, noise) == verdict


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
