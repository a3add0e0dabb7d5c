"""Models as the passes want them: named, shaped, and refused in one line where they are broken."""

import numpy as np
import onnx
import pytest

from memopt.onnx.load import OnnxModelError, fix_initializers, prepare
from memopt.onnx.read import graphs
from tests.onnx.build import model

TWICE = "(float[2,3] x) => (float[2,3] y) { a = Relu(x) y = Neg(a) }"


def test_every_node_has_a_name_of_its_own_and_every_value_a_shape():
    given = model(TWICE)
    for node in given.graph.node:
        node.name = "same"
    bits = given.SerializeToString(deterministic=True)
    found = prepare(given)
    assert [node.name for graph in graphs(found) for node in graph] == ["same", "y"]
    assert [list(node.outputs[0].shape.numpy()) for node in found.graph] == [[2, 3], [2, 3]]
    assert given.SerializeToString(deterministic=True) == bits


def test_the_two_names_of_the_standard_domain_are_one():
    given = model(TWICE)
    given.opset_import[0].domain = "ai.onnx"
    assert dict(prepare(given).opset_imports) == {"": 18}


def order(given):
    given.graph.node.extend(reversed([given.graph.node.pop(), given.graph.node.pop()]))
    given.graph.node.reverse()


@pytest.mark.parametrize(
    ("breaks", "line"),
    [
        (order, "Neg node .* reads a before anything makes it"),
        (lambda given: given.graph.output.append(onnx.helper.make_empty_tensor_value_info("z")), "the output z"),
        (lambda given: given.training_info.add(), "training information"),
        (lambda given: setattr(given.graph.node[0], "op_type", "Nothing"), "the model is invalid: .*Nothing"),
    ],
)
def test_what_is_broken_is_refused_in_one_line(breaks, line):
    given = model(TWICE)
    breaks(given)
    with pytest.raises(OnnxModelError, match=line) as refused:
        prepare(given)
    assert len(str(refused.value).splitlines()) == 1


def test_initializers_that_are_inputs_become_constants_by_request():
    given = model("(float[2] x, float[2] w) => (float[2] y) { y = Add(x, w) }", {"w": np.ones(2, np.float32)})
    prepared = prepare(given)
    fixed, names = fix_initializers(prepared)
    assert names == ("w",) and [value.name for value in fixed.graph.inputs] == ["x"]
    assert [value.name for value in prepared.graph.inputs] == ["x", "w"] and "w" in fixed.graph.initializers
    assert fix_initializers(fixed) == (fixed, ())
