import numpy as np
import pytest

from memopt.onnx.passes.fuse_matmul_add import FuseMatmulAdd
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FuseMatmulAdd()


@pytest.mark.parametrize("bias", [weight(6), weight(1, 6), weight(1), np.float32(2.0)])
@pytest.mark.parametrize("order", ["m, b", "b, m"])
def test_becomes_gemm(bias: np.ndarray, order: str) -> None:
    given = model(
        f"(float[N,4] x) => (float[N,6] y) {{ m = MatMul(x, w) y = Add({order}) }}", {"w": weight(4, 6), "b": bias}
    )
    assert operators(apply(PASS, given)[0]) == ["Gemm"]


def test_transposed_operands_are_flags() -> None:
    given = model(
        "(float[4,N] x) => (float y) { p = Transpose(x) q = Transpose<perm=[1,0]>(w) m = MatMul(p, q) y = Add(m, b) }",
        {"w": weight(6, 4), "b": weight(6)},
    )
    after, _ = apply(PASS, given)
    assert operators(after) == ["Gemm"]
    assert {name: item.value for name, item in after.graph[0].attributes.items()} == {"transA": 1, "transB": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(float[B,N,4] x) => (float y) { m = MatMul(x, w) y = Add(m, b) }", "no matrix"),
        ("(float[N,4] x) => (float y, float m) { m = MatMul(x, w) y = Add(m, b) }", "is an output"),
        ("(float[N,4] x) => (float y) { m = MatMul(x, w) y = Add(m, c) }", "widen"),
        ("(int32[N,4] x) => (int32 y) { m = MatMul(x, v) y = Add(m, d) }", "floating-point"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    weights = {"w": weight(4, 6), "b": weight(6), "c": weight(2, 1, 6), "v": np.ones((4, 6), np.int32)}
    weights["d"] = np.ones(6, np.int32)
    assert reason in reasons(unchanged(PASS, model(text, weights)))


def test_a_computed_bias_stays() -> None:
    unchanged(
        PASS, model("(float[N,4] x, float[6] b) => (float y) { m = MatMul(x, w) y = Add(m, b) }", {"w": weight(4, 6)})
    )
