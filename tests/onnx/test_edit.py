"""A model being rewritten: fresh names, outputs that keep theirs, and nothing left that nobody reads."""

import numpy as np
import onnx_ir as ir
import pytest

from memopt.onnx.edit import Edit, detach, drop_initializer
from memopt.onnx.load import prepare
from tests.onnx.build import model, operators

W = np.ones((2, 3), dtype=np.float32)


def edit(text):
    return Edit(prepare(model(text, {"w": W, "unused": W})))


def node(edited, op_type):
    (found,) = [item for graph in edited.graphs() for item in graph if item.op_type == op_type]
    return found


def test_names_are_taken_once_in_all_graphs():
    edited = edit("""(bool c, float[2,3] x) => (float[2,3] y) {
        y = If (c) <then_branch = one () => (float[2,3] a) { a = Neg(x) },
                    else_branch = other () => (float[2,3] b) { b = Add(x, w) }> }""")
    assert [edited.fresh(name) for name in ("x", "a", "w", "new", "new")] == ["x_1", "a_1", "w_1", "new", "new_1"]


def test_a_node_is_put_before_another_in_its_graph_and_its_domain_is_imported():
    edited = edit("(float[2,3] x) => (float[2,3] y) { h = Relu(x) y = Neg(h) }")
    made = edited.node(node(edited, "Neg"), "Gelu", [node(edited, "Relu").outputs[0]], {"k": 2}, domain="com.microsoft")
    assert operators(edited.model) == ["Relu", "Gelu", "Neg"]
    assert edited.model.graph.opset_imports["com.microsoft"] == 1 and made.attributes["k"].value == 2
    two = edited.node(node(edited, "Neg"), "Split", [made.outputs[0]], stem="parts", outputs=2)
    assert [value.name for value in two.outputs] == ["parts_out", "parts_1"] and two.name == "parts"


def test_constants_of_every_kind():
    edited = edit("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    value = edited.initializer(edited.model.graph, "k", np.arange(3))
    assert value.dtype is ir.DataType.INT64 and list(value.const_value.numpy()) == [0, 1, 2]
    texts = edited.initializer(edited.model.graph, "k", np.array(["a", b"b"], dtype=object))
    assert texts.name == "k_1" and texts.dtype is ir.DataType.STRING
    assert list(texts.const_value.numpy()) == [b"a", b"b"]


def test_what_takes_an_output_s_place_takes_its_name():
    edited = edit("(float[2,3] x) => (float[2,3] y) { h = Relu(x) y = Neg(h) z = Abs(x) }")
    old, new = node(edited, "Neg"), node(edited, "Abs")
    assert edited.can_replace(old.outputs[0], new.outputs[0])
    edited.replace(old.outputs[0], new.outputs[0])
    assert [value.name for value in edited.model.graph.outputs] == ["y"]
    assert edited.model.graph.outputs[0] is new.outputs[0]
    assert edited.erase(old) == 2 and operators(edited.model) == ["Abs"]


def test_what_cannot_stand_for_an_output_is_refused():
    edited = edit("(float[2,3] x) => (float[2,3] y, float[2,3] z) { y = Neg(x) z = Abs(w) }")
    output = node(edited, "Neg").outputs[0]
    for other in (edited.model.graph.inputs[0], node(edited, "Abs").outputs[0], node(edited, "Abs").inputs[0]):
        assert not edited.can_replace(output, other)
        with pytest.raises(ValueError, match=r"is an output that .* cannot stand for"):
            edited.replace(output, other)


def test_erasing_takes_what_only_the_node_read_and_keeps_what_others_read():
    edited = edit("(float[2,3] x) => (float[2,3] y) { h = Relu(x) s = Add(h, w) d = Exp(s) y = Neg(h) }")
    assert edited.erase(node(edited, "Add")) == 0, "its result is read"
    assert edited.erase(node(edited, "Exp")) == 2
    assert operators(edited.model) == ["Relu", "Neg"] and "w" not in edited.model.graph.initializers
    assert edited.erase(node(edited, "Neg")) == 0, "it is an output"


def test_an_initializer_goes_only_when_nothing_reads_it():
    edited = edit("(float[2,3] x) => (float[2,3] y) { y = Add(x, w) }")
    value = node(edited, "Add").inputs[1]
    assert drop_initializer(value) == 0
    node(edited, "Add").replace_input_with(1, edited.model.graph.inputs[0])
    assert drop_initializer(value) == W.nbytes and not edited.model.graph.initializers


def test_graphs_inside_let_go_of_what_they_read_outside():
    edited = edit("""(bool c, float[2,3] x) => (float[2,3] y) {
        y = If (c) <then_branch = one () => (float[2,3] a) { t = Neg(x) a = Abs(t) },
                    else_branch = other () => (float[2,3] b) { b = Neg(x) }> }""")
    assert [value.name for value in detach(node(edited, "If"))] == ["x", "x"]


def test_what_was_done_and_what_was_not_is_noted_in_order():
    edited = edit("(float[2,3] x) => (float[2,3] y) { y = Relu(x) }")
    edited.change("one", ["a"], ["b"])
    edited.refuse("named", "why")
    edited.refuse(node(edited, "Relu"), "because")
    assert [(item.summary, item.before, item.after) for item in edited.changes] == [("one", ("a",), ("b",))]
    assert [item.reason for item in edited.refusals] == ["why", "because"]
