import math

import numpy as np
import pytest

from memopt.onnx.passes.fuse_activations import FuseActivations
from tests.onnx.build import apply, model, operators, reasons, unchanged

PASS = FuseActivations()
NUMBERS = {
    "half": 0.5,
    "one": 1.0,
    "two": 2.0,
    "three": 3.0,
    "six": 6.0,
    "sixth": 1 / 6,
    "zero": 0.0,
    "root": math.sqrt(2),
    "unroot": 1 / math.sqrt(2),
    "cube": 0.044715,
    "angle": math.sqrt(2 / math.pi),
}


def written(nodes: str, opset: int = 20, kind: str = "float"):
    dtype = {"float": np.float32, "float16": np.float16}[kind]
    weights = {name: np.asarray(value, dtype) for name, value in NUMBERS.items()}
    return model(f"({kind}[N,5] x) => ({kind}[N,5] y) {{ {nodes} }}", weights, opset=opset)


@pytest.mark.parametrize(
    ("nodes", "operator"),
    [
        ("a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half)", "Gelu"),
        ("a = Mul(x, unroot) b = Erf(a) c = Add(one, b) d = Mul(half, x) y = Mul(c, d)", "Gelu"),
        ("a = Mul(unroot, x) b = Erf(a) c = Add(one, b) d = Mul(c, half) y = Mul(x, d)", "Gelu"),
        (
            "p = Pow(x, three) q = Mul(p, cube) r = Add(x, q) s = Mul(r, angle) t = Tanh(s) u = Add(t, one)"
            " h = Mul(x, half) y = Mul(h, u)",
            "Gelu",
        ),
        (
            "w = Mul(x, x) p = Mul(w, x) q = Mul(cube, p) r = Add(q, x) s = Mul(angle, r) t = Tanh(s) u = Add(one, t)"
            " h = Mul(x, u) y = Mul(half, h)",
            "Gelu",
        ),
        ("a = Softplus(x) b = Tanh(a) y = Mul(b, x)", "Mish"),
        ("a = Add(x, three) b = Clip(a, zero, six) c = Mul(x, b) y = Div(c, six)", "HardSwish"),
        ("a = Add(x, three) b = Clip(a, zero, six) c = Mul(b, sixth) y = Mul(c, x)", "HardSwish"),
        ("a = HardSigmoid<alpha = 0.16666667, beta = 0.5>(x) y = Mul(x, a)", "HardSwish"),
    ],
)
def test_written_out(nodes: str, operator: str) -> None:
    after, record = apply(PASS, written(nodes))
    assert operators(after) == [operator]
    assert record.evidence is not None and record.evidence.max_rel_error < 1e-6


def test_constants_of_float16() -> None:
    given = written("a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half)", kind="float16")
    after, _ = apply(PASS, given)
    assert operators(after) == ["Gelu"]


@pytest.mark.parametrize(
    "nodes",
    [
        "a = Div(x, two) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half)",
        "a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, two)",
        "a = HardSigmoid(x) y = Mul(x, a)",
        "a = Softplus(x) b = Tanh(a) y = Mul(b, a)",
    ],
)
def test_other_expressions_stay(nodes: str) -> None:
    unchanged(PASS, written(nodes))


def test_older_operator_sets_have_no_gelu() -> None:
    unchanged(PASS, written("a = Div(x, root) b = Erf(a) c = Add(b, one) d = Mul(x, c) y = Mul(d, half)", opset=18))


def test_a_result_that_is_read_elsewhere_is_refused() -> None:
    given = model("(float[N] x) => (float[N] y, float[N] z) { a = Softplus(x) b = Tanh(a) y = Mul(b, x) z = Neg(a) }")
    assert "other users" in reasons(unchanged(PASS, given))


def test_clamps_become_one() -> None:
    bounds = {name: np.float32(value) for name, value in {"a": -1, "b": 2, "c": 0, "d": 6}.items()}
    after, _ = apply(PASS, model("(float[N] x) => (float[N] y) { t = Clip(x, a, b) y = Clip(t, c, d) }", bounds))
    assert operators(after) == ["Clip"]
    assert [value.name for value in after.graph[0].inputs] == ["x", "c", "b"]


def test_one_sided_clamps_become_one() -> None:
    bounds = {"a": np.float32(-1), "b": np.float32(2)}
    after, _ = apply(PASS, model("(float[N] x) => (float[N] y) { t = Clip(x, , b) y = Clip(t, a) }", bounds))
    assert [value.name for value in after.graph[0].inputs] == ["x", "a", "b"]


def test_relu_twice_is_once() -> None:
    after, _ = apply(PASS, model("(float[N] x) => (float[N] y) { a = Relu(x) y = Relu(a) }"))
    assert operators(after) == ["Relu"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(float[N] x) => (float[N] y) { t = Clip(x, a, b) y = Clip(t, c, d) }", "do not overlap"),
        ("(float[N] x, float m) => (float[N] y) { t = Clip(x, m) y = Clip(t, c, d) }", "computed"),
        ("(float[N] x) => (float[N] y, float[N] t) { t = Clip(x, a, b) y = Clip(t, b, d) }", "other users"),
    ],
)
def test_clamps_refused(text: str, reason: str) -> None:
    bounds = {name: np.float32(value) for name, value in {"a": -1, "b": 2, "c": 3, "d": 6}.items()}
    assert reason in reasons(unchanged(PASS, model(text, bounds)))
