"""A pass on an ONNX graph: what it is given stays as it was, and is returned where nothing changed."""

import onnx_ir as ir

from memopt.onnx.graph_pass import OnnxPass
from tests.onnx.build import model, operators


class Renames(OnnxPass):
    """Makes Relu of each operator of a kind, and refuses others."""

    name = "renames"

    def __init__(self, kind):
        self.kind = kind

    def rewrite(self, edit):
        for node in edit.model.graph:
            if node.op_type == self.kind:
                node.op_type = "Relu"
                node.outputs[0].shape = None
                edit.change(f"{self.kind} is Relu", node.name)
            else:
                edit.refuse(node, "another one")


TEXT = "(float[2,3] x) => (float[2,3] y) { a = Tanh(x) y = Abs(a) }"


def test_a_copy_is_edited_and_its_shapes_are_inferred_anew():
    given = ir.from_proto(model(TEXT))
    result = Renames("Tanh").run(given)
    assert operators(given) == ["Tanh", "Abs"] and operators(result.model) == ["Relu", "Abs"]
    assert list(result.model.graph.node(0).outputs[0].shape) == [2, 3]
    assert len(result.changes) == 1 and [item.reason for item in result.refusals] == ["another one"]


def test_where_nothing_changed_the_given_model_is_returned_with_the_refusals():
    given = ir.from_proto(model(TEXT))
    result = Renames("Sin").run(given)
    assert result.model is given and not result.changes and len(result.refusals) == 2
