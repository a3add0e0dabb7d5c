import json

import pytest
import torch

from tests.cli.conftest import assert_one_line


def test_training_step_as_text(run):
    result = run("inspect", "resnet18:tiny", "--batch", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    for expected in ("parameters", "optimizer state", "largest tensors at the peak:", "training", "forward─", "█"):
        assert expected in result.stdout


def test_inference_has_no_gradients_and_no_optimizer(run):
    report = json.loads(run("inspect", "gpt2:tiny", "--inference", "--format", "json").stdout)["report"]
    assert report["breakdown"]["gradients"] == report["breakdown"]["optimizer_state"] == 0
    assert {program["kind"] for program in report["programs"]} == {"inference"}


def test_exported_program(run, folder):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    torch.export.save(torch.export.export(model, (torch.ones(2, 4),)), folder / "model.pt2")
    result = run("inspect", "model.pt2", "--format", "json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["report"]["breakdown"]["parameters"] == (4 * 8 + 8) * 4


def test_html_to_a_file(run, folder):
    assert run("inspect", "gpt2:tiny", "-o", "page.html").exit_code == 0
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("words", [("gpt7",), ("absent.pt2",), (".",), ("gpt2", "--model", "a:b")])
def test_bad_input_is_one_line_and_exit_code_2(run, words):
    assert_one_line(run("inspect", *words), 2)
