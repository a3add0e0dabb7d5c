import numpy as np
import pytest

from memopt.onnx.passes.fuse_skip_rms_norm import FuseSkipRmsNorm
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FuseSkipRmsNorm()
NUMBERS = {
    "two": np.float32(2.0), "e": np.float32(1e-5), "last": np.array([-1]), "both": np.array([1, 2]), "s": weight(8),
    "w": weight(1, 8),
}  # fmt: skip
INPUTS = "float[B,S,8] x, float[B,S,8] z"
ROOT = "q = Pow(t, two) a = ReduceMean(q, last) p = Add(a, e) r = Sqrt(p)"
NORM = f"{ROOT} c = Reciprocal(r) n = Mul(t, c)"


def given(nodes: str, inputs: str = INPUTS, outputs: str = "float[B,S,8] y"):
    return model(f"({inputs}) => ({outputs}) {{ {nodes} }}", NUMBERS)


@pytest.mark.parametrize(
    "nodes",
    [
        f"t = Add(x, z) {NORM} y = Mul(s, n)",
        f"t = Add(x, z) {ROOT} n = Div(t, r) y = Mul(n, s)",
        f"t = Add(x, z) {NORM} m = Mul(n, s) y = Add(m, t)",
        f"t = Add(x, z) g = Neg(t) {NORM} m = Mul(n, s) y = Add(m, g)",
    ],
)
def test_becomes_one_operator(nodes: str) -> None:
    after, record = apply(PASS, given(nodes))
    assert "SkipSimplifiedLayerNormalization" in operators(after) and "Sqrt" not in operators(after)
    assert record.nodes_after <= record.nodes_before - 6
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-5


@pytest.mark.parametrize(
    ("nodes", "options", "reason"),
    [
        (f"t = Add(x, z) {NORM} y = Mul(s, n)", {"inputs": "float[B,S,8] x, float[1,S,8] z"}, "one shape"),
        (f"t = Add(x, z) {NORM} y = Mul(s, n)", {"inputs": "float[B,8] x, float[B,8] z"}, "three axes"),
        (f"t = Add(x, z) {NORM} y = Mul(s, n)", {"outputs": "float y, float t"}, "is an output"),
        (f"t = Add(x, z) {NORM} y = Mul(s, n)", {"outputs": "float y, float n"}, "has other users, or is an output"),
        (f"t = Add(x, z) {NORM} y = Mul(s, n)".replace("last", "both"), {}, "more than the last axis"),
        (f"t = Add(x, z) {NORM} u = Neg(s) y = Mul(u, n)", {}, "is computed"),
        (f"t = Add(x, z) {NORM} y = Mul(w, n)", {}, "no vector"),
    ],
)
def test_refused(nodes: str, options: dict[str, str], reason: str) -> None:
    assert reason in reasons(unchanged(PASS, given(nodes, **options)))


def test_a_scale_that_may_come_too_late_is_refused() -> None:
    nodes = f"t = Add(x, z) g = Neg(t) {NORM} k = Constant<value_floats=[1.0]>() m = Mul(k, n) y = Add(m, g)"
    one = {"inputs": "float[B,S,1] x, float[B,S,1] z", "outputs": "float[B,S,1] y"}
    assert "made by a node" in reasons(unchanged(PASS, given(nodes, **one)))


def test_a_norm_of_anything_else_stays() -> None:
    unchanged(PASS, given(f"t = Neg(x) {NORM} y = Mul(s, n)", "float[B,S,8] x"))
