import numpy as np
import pytest

from memopt.onnx.passes.drop_zero_bias import DropZeroBias
from tests.onnx.build import apply, model, operators, unchanged, weight

PASS = DropZeroBias()
CONV = "(float[N,3,8,8] x) => (float y) { y = Conv(x, w, b) }"
ZEROS = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        (CONV, {"w": weight(4, 3, 3, 3), "b": ZEROS}),
        (CONV, {"w": weight(4, 3, 3, 3), "b": -ZEROS}),
        (CONV.replace("Conv", "ConvTranspose"), {"w": weight(3, 4, 3, 3), "b": ZEROS}),
        ("(float[N,3] x) => (float y) { y = Gemm<alpha=2.0>(x, w, b) }", {"w": weight(3, 4), "b": ZEROS[:1]}),
    ],
)
def test_a_bias_of_zeros_goes(text: str, weights: dict[str, np.ndarray]) -> None:
    after, record = apply(PASS, model(text, weights))
    assert len(after.graph[0].inputs) == 2 and list(after.graph.initializers) == ["w"]
    assert "does without b" in record.changes[0].summary


def test_what_computes_it_goes_too() -> None:
    text = "(float[N,3,8,8] x) => (float y) { b = Expand(z, n) y = Conv(x, w, b) }"
    given = model(text, {"w": weight(4, 3, 3, 3), "z": np.float32(0.0), "n": np.array([4])})
    after, _ = apply(PASS, given)
    assert operators(after) == ["Conv"] and list(after.graph.initializers) == ["w"]


def test_a_bias_that_others_read_stays_for_them() -> None:
    text = "(float[N,3,8,8] x) => (float y, float z) { y = Conv(x, w, b) z = Neg(b) }"
    after, _ = apply(PASS, model(text, {"w": weight(4, 3, 3, 3), "b": ZEROS}))
    assert set(after.graph.initializers) == {"w", "b"}


@pytest.mark.parametrize(
    ("text", "bias", "opset"),
    [
        (CONV, weight(4), 18),
        ("(float[N,3,8,8] x, float[4] b) => (float y) { y = Conv(x, w, b) }", None, 18),
        ("(float[N,3,8,8] x) => (float y) { y = Conv(x, w) }", None, 18),
        ("(float[N,3] x) => (float[N,4] y) { y = Gemm(x, v, b) }", ZEROS, 9),
    ],
)
def test_others_stay(text: str, bias: np.ndarray | None, opset: int) -> None:
    weights = {"w": weight(4, 3, 3, 3), "v": weight(3, 4)}
    unchanged(PASS, model(text, weights if bias is None else {**weights, "b": bias}, opset))
