import json

import pytest

from memopt.report import load
from tests.cli.conftest import assert_one_line


def test_plan_prints_the_report_and_nothing_else(run):
    result = run("plan", "gpt2:tiny", "--budget", "95%", "--optimizer", "sgd")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("GPT2")
    assert "least possible" in result.stdout
    assert result.stderr == ""


def test_json_parses_and_the_budget_is_kept(run):
    result = run("plan", "gpt2", "--tiny", "--budget", "95%", "--format", "json", "--optimizer", "none")
    report = json.loads(result.stdout)["report"]
    assert report["budget_bytes"] == int(0.95 * report["unconstrained_bytes"])
    assert report["peak_bytes"] <= report["budget_bytes"]
    assert report["breakdown"]["optimizer_state"] == 0
    assert report["breakdown"]["total"] == report["peak_bytes"]


def test_without_a_budget_the_curve_alone_is_shown(run):
    lines = run("plan", "factories:pair").stdout.splitlines()
    assert lines[0].startswith("Tiny")
    assert lines[2].startswith("what more or less memory would cost")
    assert sum("→ " in line for line in lines[4:-1]) == 1
    assert len(lines) <= 18
    assert lines[-1] == "  → what is chosen without a budget"


def test_without_a_budget_inference_is_shown_as_ever(run):
    assert "where the bytes of the predicted peak go" in run("plan", "factories:pair", "--inference").stdout


def test_json_holds_every_point_of_the_curve(run):
    report = json.loads(run("plan", "gpt2:tiny", "--format", "json", "--optimizer", "none").stdout)["report"]
    curve = report["curve"]
    assert len(curve) > 12
    assert [point["bytes"] for point in curve if point["chosen"]] == [report["peak_bytes"]]
    assert curve[-1]["bytes"] == report["minimum_bytes"]


def test_output_file_by_suffix_and_never_by_accident(run, folder):
    words = ("plan", "factories:pair", "--budget", "1GB", "-o", "report.json")
    result = run(*words)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "written to report.json\n")
    assert load(folder / "report.json").model == "Tiny"
    (folder / "report.json").write_text("mine")
    assert_one_line(run(*words), 2, "report.json exists", "--overwrite")
    assert (folder / "report.json").read_text() == "mine"
    assert run(*words, "--overwrite", "--format", "html").exit_code == 0
    assert (folder / "report.json").read_text().startswith("<!doctype html>")


def test_missing_folder_is_found_before_any_work(run):
    assert_one_line(run("plan", "llama_1b", "--budget", "1GB", "-o", "no/such.json"), 2, "the folder of no/such.json")


def test_a_budget_that_cannot_be_met_names_the_least(run):
    assert_one_line(run("plan", "gpt2:tiny", "--budget", "10kB"), 3, "the minimum is", "What would help")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("gpt2:tiny", "--budget", "20"), "20 what? say 20GB or 20GiB"),
        (("gpt2:tiny", "--budget", "20XB"), "unknown unit"),
        (("gpt2:tiny", "--budget", "-1GB"), "more than nothing"),
        (("gpt2:tiny", "--budget", "nan"), "write a size"),
        (("gpt2:tiny", "--budget", "0"), "0 what?"),
        (("gpt2:tiny", "--budget", "1GB", "--batch", "0"), "--batch"),
        (("gpt2:tiny", "--budget", "1GB", "--optimizer", "lion"), "--optimizer"),
        (("gpt2:tiny", "--budget", "1GB", "--format", "pdf"), "--format"),
        (("gpt7", "--budget", "1GB"), "no model 'gpt7'"),
        (("factories:number", "--budget", "1GB"), "returned int"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, words, expected):
    assert_one_line(run("plan", *words), 2, expected)


def test_a_factory_that_raises_is_one_line_and_exit_code_1(run):
    assert_one_line(run("plan", "factories:broken", "--budget", "1GB"), 1, "raised RuntimeError: no disk")


@pytest.mark.parametrize("verb", ["plan", "inspect"])
def test_for_a_device_that_is_not_here(run, verb):
    here, there = (
        json.loads(run(verb, "factories:pair", "--format", "json", "--optimizer", "none", *words).stdout)["report"]
        for words in ((), ("--device", "H100"))
    )
    assert there["environment"]["device"] == "NVIDIA H100 SXM5 80GB (times estimated)"
    assert there["breakdown"]["parameters"] >= here["breakdown"]["parameters"]
    assert there["breakdown"]["parameters"] % 512 == there["breakdown"]["gradients"] % 512 == 0
    assert there["unconstrained_bytes"] % 512 == 0 and there["unconstrained_bytes"] > here["unconstrained_bytes"]
    seconds = [report["curve"][0]["seconds"] for report in (here, there)]
    assert seconds[1] > 0 and seconds[0] != seconds[1]


def test_a_slower_device_takes_longer(run):
    times = []
    for device in ("h100", "a100", "t4"):
        words = ("plan", "factories:pair", "--device", device, "--format", "json", "--optimizer", "none")
        times.append(json.loads(run(*words).stdout)["report"]["curve"][0]["seconds"])
    assert times[0] < times[1] < times[2]


def test_an_unknown_device_lists_the_known_ones(run):
    for verb in ("plan", "inspect"):
        result = run(verb, "gpt2:tiny", "--device", "h1000")
        assert_one_line(result, 2, "unknown device 'h1000'", "h100,", "rtx4090", "cuda:N")
    assert_one_line(run("plan", "gpt2:tiny", "--device", "cuda:99"), 2, "cuda:99")
