"""One node on known inputs."""

import numpy as np
import onnx_ir as ir
import pytest

from memopt.graph.rewrite import Refused
from memopt.onnx import evaluate as module
from memopt.onnx.evaluate import evaluate
from tests.onnx.build import model

X = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)


def node(text):
    return ir.from_proto(model(f"(float[2,2] x, int64[2] n) => (float[2,2] y) {{ {text} }}")).graph.node(0)


def test_its_results_are_those_of_the_engines_in_the_order_of_its_outputs():
    (found,) = evaluate(node("y = Relu(x)"), [X], 18, 1000)
    np.testing.assert_array_equal(found, X.clip(0))
    assert found.dtype == np.float32
    values, places = evaluate(node("a, b = TopK(x, n)"), [X, np.array([1])], 18, 1000)
    assert values.tolist() == [[1.0], [4.0]] and places.tolist() == [[0], [1]]


def test_an_output_without_a_name_has_no_result():
    unnamed = node("a, m = Dropout(x)")
    unnamed.outputs[1].name = ""
    found, missing = evaluate(unnamed, [X], 18, 1000)
    assert missing is None and found.tolist() == X.tolist()


@pytest.mark.parametrize(
    ("text", "given", "limit", "reason"),
    [
        ("y = Expand(x, n)", [X[:1], np.array([1000, 2])], 7999, "y would take 8000 bytes"),
        ("y = NonZero(x)", [X], 1000, "the size of y is not known beforehand"),
        ("y = Relu(x)", [X.astype(object)], 1000, "its shapes cannot be inferred .*unsupported type"),
    ],
)
def test_what_is_too_large_or_unknown_is_refused(text, given, limit, reason):
    with pytest.raises(Refused, match=reason):
        evaluate(node(text), given, 18, limit)


def test_two_engines_have_to_agree(monkeypatch):
    class Other(module.Reference):
        def run(self, feeds):
            return [value + 1 for value in super().run(feeds)]

    monkeypatch.setattr(module, "Reference", Other)
    with pytest.raises(Refused, match="two engines disagree by 1"):
        evaluate(node("y = Relu(x)"), [X], 18, 1000)


def test_one_engine_is_enough_for_what_only_moves(monkeypatch):
    def fails(model):
        raise module.EngineError("no such operator")

    fails.name = "reference"
    monkeypatch.setattr(module, "Reference", fails)
    (found,) = evaluate(node("y = Transpose(x)"), [X], 18, 1000)
    np.testing.assert_array_equal(found, X.T)
    with pytest.raises(Refused, match="only one engine evaluates it"):
        evaluate(node("y = Relu(x)"), [X], 18, 1000)
