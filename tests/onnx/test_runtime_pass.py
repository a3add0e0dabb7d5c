"""Rewrites into operators that only ONNX Runtime has."""

import onnx_ir as ir
import pytest

from memopt.onnx import runtime_pass
from memopt.onnx.runtime_pass import OnnxRuntimePass
from tests.onnx.build import model, operators

TEXT = "(float[2,3] x) => (float[2,3] y) { y = Tanh(x) }"


class ToAbs(OnnxRuntimePass):
    """Makes Abs of Tanh, where it is to change something."""

    name = "to_abs"

    def __init__(self, changes=True):
        self.changes = changes

    def rewrite(self, edit):
        if self.changes:
            edit.model.graph.node(0).op_type = "Abs"
            edit.change("Tanh is Abs", "y")


@pytest.fixture
def loaded(monkeypatch):
    found = []
    monkeypatch.setattr(runtime_pass, "OnnxRuntime", found.append)
    return found


def test_the_given_model_is_loaded_where_something_changed(loaded):
    given = ir.from_proto(model(TEXT))
    assert operators(ToAbs().run(given).model) == ["Abs"] and loaded == [given]
    loaded.clear()
    assert ToAbs(changes=False).run(given).model is given and not loaded


def test_it_is_refused_where_that_fails(monkeypatch):
    def fails(model):
        raise runtime_pass.EngineError("no kernel")

    monkeypatch.setattr(runtime_pass, "OnnxRuntime", fails)
    given = ir.from_proto(model(TEXT))
    result = ToAbs().run(given)
    assert result.model is given and not result.changes
    (refusal,) = result.refusals
    assert "ONNX Runtime cannot load the model" in refusal.reason and "no kernel" in refusal.reason
