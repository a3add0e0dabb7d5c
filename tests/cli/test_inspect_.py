"""What `memopt inspect` shows of a step, and what it refuses in one line."""

import json

import pytest
import torch

from memopt.budget import format_bytes
from memopt.cli.inspect_ import _timeline
from memopt.report import ProgramReport
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


@pytest.mark.parametrize(("count", "forward"), [(2, 1), (3, 2), (9, 8), (200, 1), (200, 100), (200, 199), (72, 36)])
def test_forward_and_backward_lie_under_the_timeline(count, forward):
    program = ProgramReport("net", "training", 7, timeline_after=tuple(range(count)), forward_steps=forward)
    first, line, below = _timeline(program)
    assert first == f"net (training, 7 nodes): at most {format_bytes(count - 1)}"
    assert len(below) == len(line) == min(count, 72)
    where = below.index("│")
    assert where >= 1 and abs(where - forward / count * len(line)) <= 1
    assert "forward".startswith(below[:where].rstrip("─")) and "backward".startswith(below[where + 1 :].rstrip("─"))


@pytest.mark.parametrize(("values", "forward"), [((), 0), ((5,), 1), ((5, 6), 2), ((5, 6), 0)])
def test_a_timeline_without_backward_is_one_line(values, forward):
    lines = _timeline(ProgramReport("net", "inference", 1, timeline_after=values, forward_steps=forward))
    assert len(lines) == 2 and len(lines[1]) == len(values)
