"""What is read of ONNX nodes and values, and what is not believed."""

import numpy as np
import onnx_ir as ir
import pytest

from memopt.onnx.load import prepare
from memopt.onnx.read import (
    attribute,
    constant,
    dims,
    dropout_is_off,
    graphs,
    has_subgraphs,
    integers,
    is_random,
    is_standard,
    label,
    only_user,
    opset,
    producer,
    result,
    scalar,
    static_shape,
    subgraphs,
    weight_bytes,
)
from tests.onnx.build import model

W = np.ones((2, 3), dtype=np.float32)
BRANCHES = """(bool c, float[2,3] x) => (float[2,3] y) {
    y = If (c) <then_branch = one () => (float[2,3] a) { a = Add(x, w) },
                else_branch = other () => (float[2,3] b) { b = RandomNormalLike(x) }>
}"""


def nodes(text, weights=None, opset=18):
    found = prepare(model(text, weights, opset))
    return found, list(found.graph)


def test_constants_are_initializers_and_constant_nodes_but_no_defaults_of_inputs():
    text = "(float[2,3] x) => (float[2,3] y) { h = Constant<value_float = 0.5>() s = Mul(x, h) y = Add(s, w) }"
    _, (made, product, total) = nodes(text, {"w": W})
    assert np.array_equal(constant(total.inputs[1]), W) and scalar(total.inputs[1]) is None
    assert scalar(made.outputs[0]) == 0.5 and scalar(product.inputs[1]) == 0.5
    assert constant(product.inputs[0]) is None and constant(None) is None and constant(total.inputs[0]) is None
    found = model("(float[2,3] x, float[2,3] w) => (float[2,3] y) { y = Add(x, w) }", {"w": W})
    assert constant(ir.from_proto(found).graph[0].inputs[1]) is None, "a caller may give another"


@pytest.mark.parametrize("value", [np.array(["1"], dtype=object), np.array([True])])
def test_truth_values_and_texts_are_no_numbers(value):
    kind = "bool" if value.dtype == bool else "string"
    (node,) = ir.from_proto(model(f"(float[2] x) => ({kind}[1] y) {{ y = Identity(w) }}", {"w": value})).graph
    assert constant(node.inputs[0]) is not None and scalar(node.inputs[0]) is None


def test_lists_of_integers_as_attribute_or_input():
    _, (old,) = nodes("(float[2,1,3] x) => (float[2,3] y) { y = Squeeze<axes = [1]>(x) }", opset=11)
    assert integers(old, "axes", 1) == [1]
    _, (new,) = nodes("(float[2,1,3] x) => (float[2,3] y) { y = Squeeze(x, a) }", {"a": np.array([1])})
    assert integers(new, "axes", 1) == [1]
    _, (none,) = nodes("(float[2,1,3] x) => (float[2,3] y) { y = Squeeze(x) }")
    assert integers(none, "axes", 1) is None
    _, (computed,) = nodes("(float[2,1,3] x, int64[1] a) => (float[N,M] y) { y = Squeeze(x, a) }")
    with pytest.raises(ValueError, match="axes is computed"):
        integers(computed, "axes", 1)


def test_shapes_that_a_model_claims_of_its_outputs_are_not_believed():
    found = ir.from_proto(model("(float[2,3] x) => (float[7,7] y) { y = Relu(x) }"))
    (relu,) = found.graph
    assert static_shape(relu.inputs[0]) == [2, 3]
    assert dims(relu.outputs[0]) is None and static_shape(relu.outputs[0]) is None and dims(None) is None
    _, (open_,) = nodes("(float[N,3] x) => (float[N,3] y) { y = Relu(x) }")
    assert dims(open_.inputs[0]) == [None, 3] and static_shape(open_.inputs[0]) is None


def test_a_single_user_and_a_producer():
    _, (first, second) = nodes("(float[2,3] x) => (float[2,3] y) { h = Relu(x) y = Add(h, h) }")
    assert only_user(first.outputs[0]) is None, "it reads it twice"
    _, (kept, _) = nodes("(float[2,3] x) => (float[2,3] y, float[2,3] h) { h = Relu(x) y = Exp(h) }")
    assert only_user(kept.outputs[0]) is None, "it leaves the graph"
    assert only_user(first.inputs[0]) is first
    assert producer(second.inputs[0], "Relu") is first and producer(second.inputs[0], "Exp") is None
    assert producer(first.inputs[0]) is None and is_standard(first) and not is_standard(first, "Exp")
    assert result(first) is first.outputs[0] and result(first, 1) is None
    assert label(first) == first.name or label(first) == "h"


def test_graphs_inside_nodes_are_looked_into():
    found, (branch,) = nodes(BRANCHES, {"w": W})
    assert has_subgraphs(branch) and len(subgraphs(branch)) == 2 and len(list(graphs(found))) == 3
    assert is_random(branch, opset(found)), "one of its branches draws numbers"
    assert opset(found) == 18 and weight_bytes(found) == W.nbytes


@pytest.mark.parametrize(
    ("text", "version", "off"),
    [
        ("(float[2] x) => (float[2] y) { y = Dropout<is_test = 1>(x) }", 6, True),
        ("(float[2] x) => (float[2] y) { y = Dropout(x) }", 6, False),
        ("(float[2] x) => (float[2] y) { y = Dropout<ratio = 0.5>(x) }", 11, True),
        ("(float[2] x) => (float[2] y) { y = Dropout(x, r, t) }", 13, False),
        ("(float[2] x) => (float[2] y) { y = Dropout(x, r, f) }", 13, True),
        ("(float[2] x, bool m) => (float[2] y) { y = Dropout(x, r, m) }", 13, False),
    ],
)
def test_a_dropout_is_off_where_it_passes_its_input_on(text, version, off):
    weights = {"r": np.float32(0.5), "t": np.array(True), "f": np.array(False)}
    (node,) = ir.from_proto(model(text, weights, version)).graph
    assert dropout_is_off(node, version) == off and is_random(node, version) == (not off)


def test_attributes_with_a_default():
    _, (node,) = nodes("(float[2,3] x) => (float[2,3] y) { y = LeakyRelu<alpha = 0.5>(x) }")
    assert attribute(node, "alpha", 0.01) == 0.5 and attribute(node, "beta", 7) == 7
