import os

import numpy as np
import onnx_ir as ir
import pytest
import torch

from memopt.convert import pipeline
from memopt.convert.errors import DifferenceError
from memopt.convert.from_onnx import convert_onnx
from memopt.convert.options import Options
from memopt.convert.pipeline import convert_module
from memopt.onnx import STANDARD, OnnxPass
from memopt.onnx.engines import Reference
from tests.convert.onnx_models import saved, sound


class Spoils(OnnxPass):
    """A pass that is wrong by a thousandth, and says that it may be: no evidence of its own stops it."""

    name = "spoils"
    tolerance = 1e12

    def rewrite(self, edit):
        for graph in edit.graphs():
            for value in graph.initializers.values():
                if value.const_value is not None and len(value.const_value.shape) == 2:
                    array = value.const_value.numpy() * np.float32(1.001)
                    value.const_value = ir.tensor(array, name=value.name)
                    edit.change(f"spoiled {value.name}")


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))


X = {"input": torch.randn(3, 8)}


@pytest.mark.parametrize("place", [0, 3, len(STANDARD)])
def test_the_guilty_pass_is_found_by_cutting_the_pipeline(tmp_path, place):
    passes = (*STANDARD[:place], Spoils(), *STANDARD[place:])
    with pytest.raises(DifferenceError, match=r"guilty is pass spoils \(--skip spoils leaves it out\)") as caught:
        convert_module(layers(), X, tmp_path / "m.onnx", options=Options(passes=passes, measure=False))
    assert "the reference evaluator says so too" in str(caught.value)
    assert os.listdir(tmp_path) == []


def test_the_export_itself_and_what_follows_the_passes(tmp_path, monkeypatch):
    def spoiled(*args):
        model = emit(*args)
        weight = next(value for value in model.graph.initializers.values() if len(value.shape) == 2)
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1.001), name=weight.name)
        return model

    emit = pipeline.emit
    monkeypatch.setattr(pipeline, "emit", spoiled)
    with pytest.raises(
        DifferenceError, match=r"no pass is guilty: the graph as torch\.onnx exports it differs already"
    ):
        convert_module(layers(), X, tmp_path / "m.onnx", options=Options(measure=False))
    monkeypatch.undo()
    low = Options(dtype="bf16", tolerance=1e-6, measure=False)
    with pytest.raises(DifferenceError, match="guilty is dtype_bf16"):
        convert_module(layers(), X, tmp_path / "m.onnx", options=low)
    assert os.listdir(tmp_path) == []


def test_a_pass_on_an_onnx_file(tmp_path):
    source = saved(tmp_path, sound())
    with pytest.raises(DifferenceError, match="spoils"):
        convert_onnx(source, tmp_path / "out.onnx", options=Options(passes=(*STANDARD, Spoils()), measure=False))
    assert os.listdir(tmp_path) == ["in.onnx"]


def test_where_the_two_engines_disagree_both_are_heard(tmp_path, monkeypatch):
    def agreeing(self, feeds):
        with torch.no_grad():
            return [model(torch.as_tensor(feeds["input"]).float()).numpy()]

    model = layers()
    monkeypatch.setattr(Reference, "run", agreeing)
    with pytest.raises(DifferenceError, match="ONNX Runtime's kernels are at fault"):
        convert_module(model, X, None, options=Options(passes=(Spoils(),), measure=False))
