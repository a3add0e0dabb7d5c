"""The table of training steps: budgets are shares of torch.compile's row, every row is on file when it has ended."""

from __future__ import annotations

import json

import pytest

from benchmarks import render, training


@pytest.fixture
def table(tmp_path, monkeypatch, capsys):
    def run(*options):
        given = ["--tiny", "--repeats", "2", "--backend", "aten", "--json", str(tmp_path / "training_{model}.json")]
        monkeypatch.setattr("sys.argv", ["training.py", *given, *options])
        assert training.main() == 0
        files = sorted(tmp_path.glob("training_*.json"))
        return [json.loads(path.read_text()) for path in files], capsys.readouterr().out

    return run


def test_each_model_has_a_file_and_each_row_its_figures(table):
    (bert, unet), said = table("--model", "unet,bert_large", "--rows", "checkpoint,eager", "--jobs", "2")
    for result, model in ((bert, "bert_large"), (unet, "unet")):
        assert result["settings"]["model"] == model and result["settings"]["jobs"] == 2
        checkpoint, eager = result["rows"]
        assert (checkpoint["row"], eager["row"]) == ("checkpoint", "eager")
        assert checkpoint["peak_bytes"] < eager["peak_bytes"]
        for row in (checkpoint, eager):
            assert row["first_step_seconds"] > 0 and row["seconds"] >= row["fastest_seconds"] > 0
            assert f"{row['peak_bytes'] / 1e6:,.2f}" in said


@pytest.mark.long
def test_what_cannot_be_kept_is_refused_and_the_least_is(table):
    rows = ("--rows", "memopt:1.0,memopt:0.01,memopt:least", "--jobs", "3", "--shared-caches")
    ((result,), _) = table("--model", "unet", "--reference-bytes", "3e6", *rows)
    whole, hopeless, least = result["rows"]
    assert "seconds" not in hopeless and hopeless["minimum_bytes"] > hopeless["budget_bytes"] == 30_000
    assert 0 < whole["planning_seconds"] + whole["compile_seconds"] <= whole["first_step_seconds"]
    assert least["predicted_bytes"] <= least["budget_bytes"] < whole["budget_bytes"] == 3_000_000
    shown = render.training_table({**result, "allocator": "one"}).splitlines()
    assert "share their caches" in shown[0] and shown[2].endswith("| first step | planning | compile |")
    assert f"refused: the minimum is {hopeless['minimum_bytes'] / 1e6:,.0f} MB" in shown[5]
    assert len({line.count("|") for line in shown[2:]}) == 1
    timed = {
        **result,
        "allocator": "one",
        "rows": [{**whole, "kernels_seconds": 0.0123, "clock_hz": 1.605e9}, hopeless],
    }
    shown = render.training_table(timed).splitlines()
    assert " kernels | clock |" in shown[2] and " 12.3 ms | 1,605 MHz |" in shown[4]
    assert len({line.count("|") for line in shown[2:]}) == 1
    assert training.line_of({**whole, "retries_per_step": 1.5}).endswith("hands its cache back 1.5 times a step")
    assert "hands" not in training.line_of({**whole, "retries_per_step": 0.0})


def test_what_has_no_budget_or_no_time_says_so(table):
    ((result,), said) = table("--model", "unet", "--rows", "compile,memopt:0.5,eager", "--seconds", "0")
    late = "not ready within the 0 s that there were for everything"
    missing = "its budget is a share of the row `compile`, which has no figures"
    assert [row["error"] for row in result["rows"]] == [late, missing, late]
    assert late in said and late in render.training_table(result)


def test_a_row_that_fails_says_why(table):
    ((result,), _) = table("--model", "unet", "--rows", "eager", "--device", "nowhere")
    assert "nowhere" in result["rows"][0]["error"]


def test_references_are_for_all_models_or_by_name():
    assert training.references("2e9", ["a", "b"]) == {"a": 2 * 10**9, "b": 2 * 10**9}
    assert training.references("a=1,b=2", ["a", "b", "c"]) == {"a": 1, "b": 2}
    assert training.references("", ["a"]) == {}


@pytest.mark.long
def test_rows_of_one_model_may_be_named_alone_and_looked_into(table):
    only = ("--only", "unet:eager,unet:memopt:0.9", "--profile", "unet:eager")
    (bert, unet), said = table("--model", "unet,bert_large", "--rows", "eager", "--reference-bytes", "unet=3e6", *only)
    assert [row["row"] for row in bert["rows"]] == ["eager"]
    eager, planned = unet["rows"]
    assert planned["row"] == "memopt:0.9" and planned["budget_bytes"] == 2_700_000 and planned["changes"]
    assert eager["profile"]["busy"] > 0 and "profile" not in planned and "profile" not in bert["rows"][0]
    assert "-- eager" in said
