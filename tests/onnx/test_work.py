"""The arithmetic of ONNX nodes, at given sizes."""

import onnx_ir as ir
import pytest

from memopt.onnx.read import graphs
from memopt.onnx.sizes import known_shapes
from memopt.onnx.work import operations
from tests.onnx.build import model


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
