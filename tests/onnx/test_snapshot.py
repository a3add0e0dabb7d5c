"""What is kept of an ONNX model: its nodes known by provenance, their work, and the memory of their results."""

import gc
import weakref

import numpy as np
import onnx_ir as ir
import pytest

from memopt.onnx import STANDARD, OnnxPass, OnnxPassManager
from memopt.onnx.load import prepare
from memopt.onnx.origin import module_of, origin_of, source_of
from memopt.onnx.read import graphs
from memopt.onnx.sizes import known_shapes, shape_of, sizes_of
from memopt.onnx.snapshot import operations, snapshot
from memopt.report.side_by_side import side_by_side
from tests.onnx.build import model, weight

CHAIN = """(float[N,4] x) => (float[N,8] y) {
  a = Relu(x) b = MatMul(a, w) c = Identity(b) d = Add(c, v) y = Softmax(d) }"""
WEIGHTS = {"w": weight(4, 8), "v": weight(8)}


def taken(text=CHAIN, weights=WEIGHTS, **sizes):
    made = prepare(model(text, weights))
    return snapshot(made, shapes=known_shapes([made], sizes))


def by_operator(record):
    return {node.operator: node for node in record.nodes}


def test_nodes_read_what_they_read():
    record = taken(N=3)
    nodes = by_operator(record)
    assert [node.operator for node in record.steps] == ["Relu", "MatMul", "Identity", "Add", "Softmax"]
    assert nodes["MatMul"].inputs == (nodes["Relu"].id, "w")
    assert nodes["MatMul"].result == "float[N, 8]"
    assert nodes["output"].inputs == (nodes["Softmax"].id,)


def test_work_at_the_sizes():
    nodes = by_operator(taken(N=3))
    assert nodes["MatMul"].flops == 2 * 3 * 8 * 4
    assert nodes["MatMul"].moved == 4 * (3 * 4 + 4 * 8 + 3 * 8)
    assert nodes["Identity"].moved == 0


def test_memory_step_by_step():
    """Relu's result dies with MatMul; MatMul's lives on behind Identity, which makes none; the result stays."""
    record = taken(N=3)
    small, large = 3 * 4 * 4, 3 * 8 * 4
    assert record.live_bytes == (small, small + large, large, 2 * large, 2 * large)
    assert record.forward_steps == len(record.steps) == 5


def test_attention_is_scores_and_their_sums():
    text = "(float[2,5,8] q, float[2,7,8] k, float[2,7,8] v) => (float[2,5,8] y)"
    text += " { y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v) }"
    made = prepare(model(text, {}, **{"com.microsoft": 1}))
    assert snapshot(made, shapes=known_shapes([made], {})).flops == 2 * 2 * 5 * 7 * (8 + 8)


def test_memory_that_is_not_known_is_not_invented():
    record = taken()
    assert record.peak_bytes is None
    assert "no known size" in record.unknown
    assert record.storages == ()


def test_graphs_inside_nodes_come_before_them():
    text = """(bool p, float[2] x) => (float[2] y) {
      y = If(p) <then_branch = g () => (float[2] t) { t = Relu(x) },
                 else_branch = h () => (float[2] e) { e = Neg(x) }> }"""
    record = taken(text, {})
    assert [node.operator for node in record.steps] == ["Relu", "Neg", "If"]
    assert record.unknown == "a node holds a graph of its own"


@pytest.mark.parametrize(
    ("text", "weights", "flops"),
    [
        ("(float[2,3,8,8] x) => (float[2,5,6,6] y) { y = Conv(x, k) }", {"k": weight(5, 3, 3, 3)}, 2 * 2 * 5 * 36 * 27),
        ("(float[4,3] x) => (float[3,5] y) { y = Gemm <transA = 1> (x, m) }", {"m": weight(4, 5)}, 2 * 15 * 4),
        ("(float[2,3,4] x) => (float[2,3,4] y) { y = Relu(x) }", {}, 0),
        (
            "(float[1,3,4,4] x) => (float[1,5,6,6] y) { y = ConvTranspose(x, k) }",
            {"k": weight(3, 5, 3, 3)}, 2 * 48 * 45,
        ),
    ],
)  # fmt: skip
def test_arithmetic(text, weights, flops):
    assert taken(text, weights).flops == flops


def test_passes_are_on_record_with_the_graphs_before_and_after():
    manager = OnnxPassManager(STANDARD, inputs=[{"x": np.ones((3, 4), np.float32)}], record=True)
    _, records = manager.run(model(CHAIN, WEIGHTS))
    for record in records:
        assert (record.before is record.after) == (not record.changes)
        assert record.after.peak_bytes is not None
    assert len(records[0].before.steps) == 5
    removed = next(record for record in records if record.name == "eliminate_no_ops")
    pairs = side_by_side(removed.before, removed.after)
    assert [pair.before.operator for pair in pairs if pair.kind == "removed"] == ["Identity"]


def test_nothing_is_recorded_unasked():
    _, records = OnnxPassManager(STANDARD[:1]).run(model(CHAIN, WEIGHTS))
    assert [record.before for record in records] == [None]


class Again(OnnxPass):
    """Puts a new node in place of the Relu, under its name."""

    name = "again"

    def rewrite(self, edit):
        old = next(node for node in edit.model.graph if node.op_type == "Relu")
        made = edit.node(old, "Max", [old.inputs[0], old.inputs[0]])
        old.outputs[0].replace_all_uses_with(made.outputs[0])
        name = old.name
        edit.model.graph.remove(old, safe=True)
        made.name = name
        edit.change("replaced", [str(name)])


def test_a_name_given_again_is_another_node():
    manager = OnnxPassManager([Again()], verify=False, record=True)
    _, (record,) = manager.run(model(CHAIN, WEIGHTS))
    old, new = by_operator(record.before)["Relu"], by_operator(record.after)["Max"]
    assert old.name == new.name
    assert old.id != new.id


def test_ids_go_on_from_run_to_run():
    manager = OnnxPassManager([Again()], verify=False, record=True)
    after, first = manager.run(model(CHAIN, WEIGHTS))
    _, second = OnnxPassManager(STANDARD, record=True).run(after, first)
    assert by_operator(second[0].before)["Max"].id == by_operator(first[0].after)["Max"].id


def test_sizes_come_from_the_inputs():
    made = prepare(model(CHAIN, WEIGHTS))
    sizes = sizes_of(made, {"x": np.ones((7, 4))})
    assert sizes == {"N": 7}
    assert sizes_of(made, {}) == {}
    assert shape_of(made.graph.outputs[0], known_shapes([made], sizes)) == (7, 8)


def test_names_of_axes_are_never_run_as_code():
    made = prepare(model(CHAIN, WEIGHTS))
    made.graph.inputs[0].shape = ir.Shape(["__import__('os').abort()", 4])
    assert snapshot(made, shapes=known_shapes([made], {})).unknown


def test_modules_and_lines_of_the_exporter():
    node = ir.node("Relu", [ir.Value(name="x")])
    node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'encoder', 'encoder.layers.0', 'relu']"
    node.metadata_props["pkg.torch.onnx.stack_trace"] = (
        'File "model.py", line 3, in forward\n    x = self.act(x)\n'
        '  File "/lib/torch/nn/modules/activation.py", line 9, in forward\n    return F.relu(x)'
    )
    assert origin_of(node) == {"memopt.module": "encoder.layers.0", "memopt.source": "model.py:3, x = self.act(x)"}
    node.meta.update(origin_of(node))
    assert (module_of(node), source_of(node)) == ("encoder.layers.0", "model.py:3, x = self.act(x)")
    assert module_of(ir.node("Relu", [ir.Value(name="x")], name="/encoder/layer.0/act/Relu")) == "encoder.layer.0.act"


@pytest.mark.parametrize("scopes", ["", "not python", "['only']", "[1, 2, 3]", "__import__('os')"])
def test_notes_of_another_form_are_nothing(scopes):
    node = ir.node("Relu", [ir.Value(name="x")])
    node.metadata_props["pkg.torch.onnx.name_scopes"] = scopes
    assert origin_of(node) == {}
    assert module_of(node) == ""


def test_no_model_is_kept_alive():
    made = prepare(model(CHAIN, WEIGHTS))
    dead = weakref.ref(made)
    record = snapshot(made)
    del made
    gc.collect()
    assert dead() is None
    assert record.nodes


def counted(text, **sizes):
    given = ir.from_proto(model(text, opset=23))
    shapes = known_shapes([given], sizes)
    return [operations(node, shapes) for graph in graphs(given) for node in graph]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(float[4,3] x, float[3,5] w) => (float[4,5] y) { y = MatMul(x, w) }", 2 * 4 * 5 * 3),
        ("(float[3,4] x, float[3,5] w) => (float[4,5] y) { y = Gemm<transA=1>(x, w) }", 2 * 4 * 5 * 3),
        ("(float[2,4,8,8] x, float[6,2,3,3] w) => (float[2,6,6,6] y) { y = Conv<group=2>(x, w) }", 2 * 2 * 6 * 36 * 18),
        (
            "(float[1,4,8,8] x, float[4,6,2,2] w) => (float[1,6,9,9] y) { y = ConvTranspose(x, w) }",
            2 * 4 * 64 * 6 * 4,
        ),
        (
            "(float[2,3,5,8] q, float[2,3,7,8] k, float[2,3,7,4] v) => (float[2,3,5,4] y) { y = Attention(q, k, v) }",
            2 * 2 * 3 * 5 * 7 * (8 + 4),
        ),
        ("(float[4,3] x) => (float[4,3] y) { y = Relu(x) }", 0),
        ("(float[N,3] x, float[3,5] w) => (float[N,5] y) { y = MatMul(x, w) }", None),
    ],
)
def test_two_for_a_multiplication_with_its_addition(text, expected):
    assert counted(text) == [expected]


def test_sizes_that_vary_are_those_that_are_given():
    assert counted("(float[N,3] x, float[3,5] w) => (float[N,5] y) { y = MatMul(x, w) }", N=4) == [2 * 4 * 5 * 3]
