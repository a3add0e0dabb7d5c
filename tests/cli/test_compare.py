"""`memopt compare`: the words, and one whole run."""

import importlib
import json

import pytest

from memopt.comparison.record import Comparison, Row
from tests.cli.conftest import assert_one_line

verb = importlib.import_module("memopt.cli.compare")  # the package's name for it is the command


@pytest.fixture
def asked(monkeypatch):
    """What would be compared; nothing is run. The rows to be returned can be set."""
    found = {"rows": (Row("eager", seconds=(0.001,)),)}

    def compare_cases(cases, folder, **how):
        (case,) = cases
        found.update(how, job=case.job, engines=[item.name for item in case.engines])
        settings = {"warmup": 3, "repeats": 20, "threads": 1}
        return [Comparison(case.title, "inference", "cpu", "as given", found["rows"], settings, {"torch": "2"})]

    monkeypatch.setattr(verb, "compare_cases", compare_cases)
    return found


def test_what_is_asked_for(run, asked):
    result = run("compare", "gpt2", "--tiny", "--backends", "aten,static", "--batch", 3, "--dtype", "bfloat16")
    assert result.exit_code == 0 and result.stdout.startswith("gpt2:tiny, inference") and not result.stderr
    assert asked["engines"] == ["eager", "compile", "aten", "static"]
    assert asked["job"].dtype == "bfloat16" and asked["job"].device == "cpu" and not asked["job"].training
    model, inputs = verb.loaded(**asked["job"].source.arguments)
    assert not model.training and inputs["input_ids"].shape[0] == 3


def test_training_with_budgets_and_all_peers(run, asked):
    words = ("--train", "--backends", "aten", "--peers", "all", "--budget", "1GB,60%", "--optimizer", "sgd")
    assert run("compare", "gpt2:tiny", *words).exit_code == 0
    assert asked["engines"][0] == "eager" and asked["engines"][-3:] == ["aten", "aten:1GB", "aten:60%"]
    assert "checkpoint" in asked["engines"] and "compile:0.1" in asked["engines"]
    assert asked["job"].training and asked["job"].optimizer == "sgd"
    assert verb.loaded(**asked["job"].source.arguments)[0].training


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("gpt7",), "no model 'gpt7'"),
        (("gpt2:tiny", "--backends", "tensorrt"), "unknown backend 'tensorrt'"),
        (("gpt2:tiny", "--backends", "eager"), "unknown backend 'eager'"),
        (("gpt2:tiny", "--peers", "jax"), "unknown engine 'jax'"),
        (("gpt2:tiny", "--peers", "none", "--backends", ""), "nothing to compare"),
        (("gpt2:tiny", "--budget", "8GB"), "--budget goes with --train"),
        (("gpt2:tiny", "--train", "--budget", "8"), "8 what?"),
        (("gpt2:tiny", "--optimizer", "sgd"), "--optimizer goes with --train"),
        (("gpt2:tiny", "--device", "cuda:99"), "cuda:99"),
        (("gpt2:tiny", "--device", "h100"), "'h100'"),
        (("net.pt2", "--train"), "keeps forward only"),
        (("gpt2:tiny", "-o", "no/such.html"), "the folder of no/such.html"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, asked, words, expected):
    assert_one_line(run("compare", *words), 2, expected)
    assert "engines" not in asked


def test_exit_codes_come_after_the_table(run, asked):
    asked["rows"] = (Row("eager", seconds=(0.001,)), Row("aten", seconds=(0.001,), error=1.0, differs=True))
    result = run("compare", "gpt2:tiny")
    assert result.exit_code == 4 and "aten" in result.stdout
    assert result.stderr == "error: the numbers of aten differ by more than rounding explains\n"
    asked["rows"] = (Row("eager", reason="killed by SIGSEGV"),)
    result = run("compare", "gpt2:tiny", "--format", "json")
    assert result.exit_code == 1 and json.loads(result.stdout)["rows"][0]["reason"] == "killed by SIGSEGV"
    assert "the table says why" in result.stderr


@pytest.mark.long
def test_a_whole_run(run, folder):
    words = ("--backends", "aten", "--peers", "eager", "--repeats", 2, "--jobs", 2, "-o", "out.html")
    result = run("compare", "factories:pair", *words)
    assert (result.exit_code, result.stdout) == (0, ""), result.stderr
    page = (folder / "out.html").read_text()
    assert page.count("<svg") == 4 and ">aten<" in page
