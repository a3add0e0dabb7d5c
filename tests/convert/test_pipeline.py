"""From a captured model to its file: what is on record, and what is left behind by a conversion that fails."""

import pytest
import torch
from torch import nn

from memopt.convert.capture import capture
from memopt.convert.errors import ConversionError
from memopt.convert.options import Options
from memopt.convert.pipeline import Clock, convert_captured, convert_module


def test_a_record_says_what_was_done_and_the_file_is_there(tmp_path):
    steps = []
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    path = tmp_path / "model.onnx"
    record = convert_module(model, {"input": torch.ones(2, 4)}, path, options=Options(notify=steps.append))
    assert path.exists() and record.output == str(path) and record.source == "Sequential"
    assert sum(record.nodes_after.values()) <= sum(record.nodes_before.values())
    assert record.runs and {"capture", "export", "verify", "write"} <= record.seconds.keys()
    assert [step for step in steps if step in record.seconds][:2] == ["capture", "export"]


def test_without_a_file_it_is_verified_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = convert_module(nn.Linear(4, 3).eval(), {"input": torch.ones(2, 4)}, None)
    assert record.output is None and record.runs and not list(tmp_path.iterdir())


def test_what_cannot_be_run_leaves_nothing(tmp_path, monkeypatch):
    captured = capture(nn.Linear(4, 3).eval(), {"input": torch.ones(2, 4)}, {}, required=())

    def fails(**inputs):
        raise ValueError("made up")

    object.__setattr__(captured, "function", fails)
    with pytest.raises(ConversionError, match="made up"):
        convert_captured(captured, tmp_path / "model.onnx", source="Linear")
    assert not list(tmp_path.iterdir())


def test_a_step_that_comes_twice_adds_up():
    clock = Clock()
    for _ in range(2):
        before = clock.seconds.get("passes", 0.0)
        with clock("passes"):
            sum(range(1000))
    assert clock.seconds["passes"] > before > 0
