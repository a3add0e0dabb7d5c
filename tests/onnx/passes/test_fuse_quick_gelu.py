import numpy as np
import onnx
import pytest

from memopt.onnx.passes.fuse_quick_gelu import FuseQuickGelu
from tests.onnx.build import apply, model, operators, reasons, unchanged

PASS = FuseQuickGelu()
NUMBERS = {"k": np.float32(1.702), "l": np.float32(1.5)}


@pytest.mark.parametrize(
    ("nodes", "alpha"),
    [
        ("s = Sigmoid(x) y = Mul(x, s)", 1.0),
        ("s = Sigmoid(x) y = Mul(s, x)", 1.0),
        ("m = Mul(k, x) s = Sigmoid(m) y = Mul(x, s)", 1.702),
    ],
)
def test_becomes_one_operator(nodes: str, alpha: float) -> None:
    after, record = apply(PASS, model(f"(float[N,5] x) => (float[N,5] y) {{ {nodes} }}", NUMBERS))
    assert operators(after) == ["QuickGelu"]
    assert after.graph[0].attributes["alpha"].as_float() == alpha
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


def test_another_factor_stays() -> None:
    unchanged(PASS, model("(float[N] x) => (float[N] y) { m = Mul(l, x) s = Sigmoid(m) y = Mul(x, s) }", NUMBERS))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(float[N] x) => (float[N] y, float[N] s) { s = Sigmoid(x) y = Mul(x, s) }", "is an output"),
        ("(double[N] x) => (double[N] y) { s = Sigmoid(x) y = Mul(x, s) }", "16 and 32 bits"),
    ],
)
def test_refused(text: str, reason: str) -> None:
    assert reason in reasons(unchanged(PASS, model(text)))


def test_a_model_that_onnx_runtime_cannot_load_is_left_as_it_is() -> None:
    given = model(
        "(float[N,5] x) => (float[N,5] y) { s = Sigmoid(x) y = Mul(x, s) }", opset=onnx.defs.onnx_opset_version()
    )
    assert "ONNX Runtime cannot load the model" in reasons(unchanged(PASS, given))
