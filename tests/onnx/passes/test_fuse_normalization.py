import numpy as np
import pytest

from memopt.onnx.passes.fuse_normalization import FuseNormalization
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FuseNormalization()
WEIGHTS = {"e": np.float32(1e-5), "s": weight(8), "b": weight(8, seed=1), "t": np.float32(2.0), "o": np.float32(1.0)}
LAYER = "m = ReduceMean(x, a) d = Sub(x, m) p = Pow(d, t) v = ReduceMean(p, a) w = Add(v, e) r = Sqrt(w)"


def given(nodes: str, opset: int = 18, axes: tuple[int, ...] = (-1,), outputs: str = "float y", **weights: np.ndarray):
    return model(
        f"(float[N,4,8] x) => ({outputs}) {{ {nodes} }}", {**WEIGHTS, **weights, "a": np.array(axes)}, opset=opset
    )


@pytest.mark.parametrize(
    "end",
    [
        "n = Div(d, r) q = Mul(n, s) y = Add(q, b)",
        "n = Div(d, r) q = Mul(s, n) y = Add(b, q)",
        "i = Reciprocal(r) n = Mul(d, i) q = Mul(n, s) y = Add(q, b)",
        "i = Div(o, r) n = Mul(d, i) y = Mul(n, s)",
    ],
)
def test_layer_normalization(end: str) -> None:
    after, record = apply(PASS, given(f"{LAYER} {end}"))
    assert operators(after) == ["LayerNormalization"]
    assert record.evidence is not None and record.evidence.error_ratio is not None


def test_over_two_axes() -> None:
    weights = {"s": weight(4, 8), "b": weight(4, 8, seed=1)}
    after, _ = apply(PASS, given(f"{LAYER} n = Div(d, r) q = Mul(n, s) y = Add(q, b)", axes=(1, 2), **weights))
    assert after.graph[0].attributes["axis"].as_int() == -2


RMS = "p = Mul(x, x) v = ReduceMean(p, a) w = Add(v, e) r = Sqrt(w) n = Div(x, r) y = Mul(n, s)"


def test_root_mean_square_normalization_from_operator_set_23() -> None:
    assert operators(apply(PASS, given(RMS, opset=23))[0]) == ["RMSNormalization"]
    unchanged(PASS, given(RMS, opset=18))


@pytest.mark.parametrize(
    ("nodes", "options", "reason"),
    [
        (f"{LAYER} n = Div(d, r) y = Mul(n, s)", {"axes": (1,)}, "not over the last ones"),
        (f"{LAYER} n = Div(d, r) y = Mul(n, s)", {"s": weight(1)}, "not that of the axes"),
        (f"{LAYER} n = Div(d, r) y = Mul(n, s)", {"outputs": "float y, float m"}, "is an output"),
        (
            f"{LAYER} n = Div(d, r) z = Neg(x) u = ReduceMean(z, k) y = Mul(n, u)",
            {"k": np.array([0, 1, 2])},
            "is computed",
        ),
    ],
)
def test_refused(nodes: str, options: dict[str, object], reason: str) -> None:
    assert reason in reasons(unchanged(PASS, given(nodes, **options)))  # type: ignore[arg-type]


def test_another_power_is_no_normalization() -> None:
    unchanged(PASS, given(f"{LAYER} n = Div(d, r) y = Mul(n, s)", t=np.float32(3.0)))
