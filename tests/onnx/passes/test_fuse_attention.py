import numpy as np
import pytest

from memopt.onnx.passes.fuse_attention import FuseAttention
from tests.onnx.build import apply, model, operators, reasons, unchanged

PASS = FuseAttention()
NUMBERS = {
    "c": np.float32(0.5),
    "d": np.float32(2.0),
    "root": np.float32(0.7),
    "zero": np.float32(0.0),
    "low": np.float32(-1e9),
    "infinite": np.float32(-np.inf),
}
QKV = "float[B,2,S,4] q, float[B,2,T,4] k, float[B,2,T,4] v"
TURN = "t = Transpose<perm=[0,1,3,2]>(k)"


def given(nodes: str, inputs: str = "", opset: int = 23, outputs: str = "float y"):
    return model(f"({QKV}{inputs}) => ({outputs}) {{ {nodes} }}", NUMBERS, opset=opset)


@pytest.mark.parametrize(
    ("nodes", "inputs"),
    [
        (f"{TURN} s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v)", ""),
        (f"{TURN} s = MatMul(q, t) e = Mul(s, c) p = Softmax<axis=3>(e) y = MatMul(p, v)", ""),
        (f"{TURN} s = MatMul(q, t) e = Div(s, d) p = Softmax(e) y = MatMul(p, v)", ""),
        (f"{TURN} f = Mul(q, root) g = Mul(root, t) s = MatMul(f, g) p = Softmax(s) y = MatMul(p, v)", ""),
        (
            f"{TURN} s = MatMul(q, t) e = Mul(s, c) a = Add(m, e) p = Softmax(a) y = MatMul(p, v)",
            ", float[B,1,S,T] m",
        ),
        (
            f"{TURN} s = MatMul(q, t) p = Softmax(s) n = IsNaN(p) w = Where(n, zero, p) y = MatMul(w, v)",
            "",
        ),
        (
            f"{TURN} m = Where(b, zero, low) s = MatMul(q, t) a = Add(s, m) p = Softmax(a) n = IsNaN(p)"
            " w = Where(n, zero, p) y = MatMul(w, v)",
            ", bool[1,1,S,T] b",
        ),
    ],
)
def test_becomes_attention(nodes: str, inputs: str) -> None:
    after, record = apply(PASS, given(nodes, inputs))
    assert [op for op in operators(after) if op != "Where"] == ["Attention"]
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


@pytest.mark.parametrize(
    ("nodes", "inputs", "reason"),
    [
        (
            f"{TURN} m = Where(b, zero, infinite) s = MatMul(q, t) a = Add(s, m) p = Softmax(a) n = IsNaN(p)"
            " w = Where(n, zero, p) y = MatMul(w, v)",
            ", bool[1,1,S,T] b",
            "masked throughout",
        ),
        (
            f"{TURN} s = MatMul(q, t) a = Add(s, m) p = Softmax(a) y = MatMul(p, v)",
            ", float[B,1,1,U] m",
            "shape of its mask",
        ),
    ],
)
def test_refused(nodes: str, inputs: str, reason: str) -> None:
    assert reason in reasons(unchanged(PASS, given(nodes, inputs)))


def test_scores_that_are_read_elsewhere_are_refused() -> None:
    nodes = f"{TURN} s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v)"
    assert "is an output" in reasons(unchanged(PASS, given(nodes, outputs="float y, float p")))


def test_older_operator_sets_have_no_attention() -> None:
    unchanged(PASS, given(f"{TURN} s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v)", opset=22))


def test_a_softmax_over_another_axis_is_none() -> None:
    unchanged(PASS, given(f"{TURN} s = MatMul(q, t) p = Softmax<axis=1>(s) y = MatMul(p, v)"))
