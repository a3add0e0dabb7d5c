"""Which nodes may compute in lower precision, and why others may not."""

import onnx_ir as ir
import pytest

from memopt.convert.precision import choose, is_float32, too_large
from memopt.onnx.load import prepare
from tests.onnx.build import model as built

HALF, BRAIN = ir.DataType.FLOAT16, ir.DataType.BFLOAT16


def chosen(text, kind=HALF, **constants):
    """Operators that compute in the type, and reasons of the others."""
    found, reasons = choose(prepare(built(text, **constants)), kind)
    return {node.op_type for node in found}, {node.op_type: reason for node, reason in reasons.items()}


def test_products_may_and_what_is_sensitive_may_not():
    found, reasons = chosen("(float[2,4] x, float[4,4] w) => (float[2,4] y) { p = MatMul(x, w) y = Softmax(p) }")
    assert found == {"MatMul"}
    assert reasons == {"Softmax": "it is sensitive to rounding"}


def test_what_says_its_own_type_keeps_it():
    found, reasons = chosen("(int64[2] x) => (float[2] y) { f = Cast<to=1>(x) y = Relu(f) }")
    assert found == {"Relu"}
    assert reasons == {"Cast": "it says which type it makes"}


def test_what_only_moves_numbers_between_others_is_left():
    found, reasons = chosen("(float[2,4] x) => (float[4,2] y) { e = Exp(x) t = Transpose<perm=[1,0]>(e) y = Exp(t) }")
    assert not found and "Transpose" in reasons


@pytest.mark.parametrize(("kind", "fits"), [(HALF, False), (BRAIN, True)])
def test_numbers_that_a_type_cannot_hold(kind, fits):
    text = "(float[2] x) => (float[2] y) { c = Constant<value_float=100000.0>() y = Mul(x, c) }"
    found, reasons = chosen(text, kind)
    assert ("Mul" in found) == fits
    assert fits or "cannot hold" in reasons["Mul"]


def test_only_float32_tensors_are_asked_about():
    graph = prepare(built("(float[2] x, int64[2] i) => (float[2] y) { y = Relu(x) }")).graph
    assert [is_float32(value) for value in (*graph.inputs, None)] == [True, False, False]
    assert not too_large(graph.inputs[0], HALF), "what is not known is not too large"
