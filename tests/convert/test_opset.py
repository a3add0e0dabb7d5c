"""Graphs at another operator set: converted and checked, or refused in one line."""

import numpy as np
import pytest

from memopt.convert import opset as converting
from memopt.convert.errors import ConversionError
from memopt.convert.opset import at_opset
from memopt.onnx.engines import OnnxRuntime
from memopt.onnx.load import prepare
from memopt.onnx.read import opset
from tests.onnx.build import model

SUMS = "(float[2,3] x) => (float[2] y) { a = Relu(x) y = ReduceSum<keepdims=0>(a, axes) }"


@pytest.mark.parametrize("version", [18, 21, 23, 25])
def test_a_graph_computes_the_same_at_another_operator_set(version):
    given = prepare(model(SUMS, {"axes": np.array([1])}, opset=17))
    found = at_opset(given, version)
    assert opset(found) == version and opset(given) == 17 and all(node.name for node in found.graph)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    assert np.array_equal(OnnxRuntime(found).run({"x": x})[0], OnnxRuntime(given).run({"x": x})[0])


@pytest.mark.parametrize("version", [12, 0, 10**4])
def test_a_version_that_cannot_be_had(version):
    given = prepare(model("(float[2,3] x) => (float[2,3] y) { y = LayerNormalization(x, s) }", {"s": np.ones(3, "f")}))
    with pytest.raises(ConversionError, match=rf"operator set {version}\b") as caught:
        at_opset(given, version)
    assert "\n" not in str(caught.value)


def test_weights_that_one_message_cannot_hold(monkeypatch):
    given = prepare(model(SUMS, {"axes": np.array([1])}, opset=17))
    monkeypatch.setattr(converting, "SINGLE_FILE_BYTES", 7)
    with pytest.raises(ConversionError, match="weights above 7 bytes"):
        at_opset(given, 18)
