import numpy as np
import onnx_ir as ir

from memopt.onnx.passes.order_nodes import OrderNodes
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = OrderNodes()
# Two large values made before either is reduced: one after the other needs half as much.
WIDE = (
    "(float[4,64] x) => (float y) { a = MatMul(x, w) b = MatMul(x, v) c = ReduceSum<keepdims=0>(a, k)"
    " d = ReduceSum<keepdims=0>(b, k) y = Add(c, d) }"
)


def weights() -> dict[str, object]:
    return {"w": weight(64, 512), "v": weight(64, 512, seed=1), "k": np.array([0, 1])}


def test_one_branch_after_the_other() -> None:
    after, record = apply(PASS, model(WIDE, weights()))
    assert operators(after) == ["MatMul", "ReduceSum", "MatMul", "ReduceSum", "Add"]
    assert record.changes[0].summary == "peak of 16388 bytes is now 8200 (dynamic axes at 8)"
    assert record.evidence is not None and record.evidence.max_abs_error == 0.0


def test_a_best_order_stays() -> None:
    unchanged(PASS, model("(float[N,64] x) => (float[N,64] y) { a = Neg(x) y = Exp(a) }"))


def test_unknown_sizes_are_refused() -> None:
    given = model("(float[N] x) => (float[M] y) { q = SequenceConstruct(x, x) y = ConcatFromSequence<axis=0>(q) }")
    assert "is not known" in reasons(unchanged(PASS, given))


def test_what_a_branch_reads_comes_before_it() -> None:
    text = (
        "(bool c, float[4,64] x) => (float y) { a = MatMul(x, w) b = MatMul(x, v) d = ReduceSum<keepdims=0>(b, k)"
        " e = If(c) <then_branch = g () => (float t) { t = ReduceSum<keepdims=0>(a, k) },"
        " else_branch = h () => (float u) { u = ReduceMax<keepdims=0>(a, k) }> y = Add(d, e) }"
    )
    given = model(text, weights())
    after, _ = apply(PASS, given)
    order = [node.op_type for node in after.graph]
    assert isinstance(after, ir.Model) and order.index("If") > order.index("MatMul") and order[-1] == "Add"
