from typing import Any

import numpy as np
import pytest

from memopt.onnx.passes.fuse_conv_bn import FuseConvBn
from tests.onnx.build import apply, model, operators, reasons, unchanged, weight

PASS = FuseConvBn()


def norm(channels: int) -> dict[str, Any]:
    names = ("scale", "shift", "mean", "var")
    return {name: np.abs(weight(channels, seed=i + 5)) + 0.5 for i, name in enumerate(names)}


BN = "y = BatchNormalization(c, scale, shift, mean, var)"


@pytest.mark.parametrize(
    ("layer", "shape", "weights"),
    [
        ("Conv<pads=[1,1,1,1]>(x, w)", "[N,4,H,W]", {"w": weight(6, 4, 3, 3)}),
        ("Conv<group=2>(x, w, b)", "[N,4,H,W]", {"w": weight(6, 2, 3, 3), "b": weight(6, seed=2)}),
        ("Conv(x, w)", "[N,4,L]", {"w": weight(6, 4, 1)}),
        ("Conv(x, w)", "[N,4,D,H,W]", {"w": weight(6, 4, 1, 1, 2)}),
        ("ConvTranspose<strides=[2,2]>(x, w)", "[N,4,H,W]", {"w": weight(4, 6, 3, 3)}),
        ("ConvTranspose<group=2>(x, w, b)", "[N,4,H,W]", {"w": weight(4, 3, 2, 2), "b": weight(6, seed=2)}),
        ("Gemm(x, w)", "[N,4]", {"w": weight(4, 6)}),
        ("Gemm<transB=1, alpha=0.5, beta=2.0>(x, w, b)", "[N,4]", {"w": weight(6, 4), "b": weight(6, seed=2)}),
        ("Gemm(x, w, b)", "[N,4]", {"w": weight(4, 6), "b": weight(1, 6, seed=2)}),
    ],
)
def test_folds(layer: str, shape: str, weights: dict[str, Any]) -> None:
    given = model(f"(float{shape} x) => (float y) {{ c = {layer} {BN} }}", {**weights, **norm(6)})
    after, record = apply(PASS, given)
    assert operators(after) == [layer.split("(")[0].split("<")[0]]
    assert len(after.graph.initializers) == 2
    assert record.evidence is not None and record.evidence.error_ratio is not None


def test_folded_in_float64_and_cast_once() -> None:
    given = model(f"(float[N,4,H,W] x) => (float y) {{ c = Conv(x, w) {BN} }}", {"w": weight(6, 4, 1, 1), **norm(6)})
    after, _ = apply(PASS, given)
    n = {key: value.astype(np.float64) for key, value in norm(6).items()}
    factor = n["scale"] / np.sqrt(n["var"] + float(np.float32(1e-5)))
    expected = (weight(6, 4, 1, 1).astype(np.float64) * factor.reshape(6, 1, 1, 1)).astype(np.float32)
    found = next(v for v in after.graph.initializers.values() if v.const_value.numpy().ndim == 4)
    np.testing.assert_array_equal(found.const_value.numpy(), expected)


def test_mul_and_add_per_channel_fold() -> None:
    given = model(
        "(float[N,4,H,W] x) => (float y) { c = Conv(x, w) d = Mul(s, c) y = Add(d, t) }",
        {"w": weight(6, 4, 1, 1), "s": weight(6, 1, 1, seed=3), "t": weight(1, 6, 1, 1, seed=4)},
    )
    assert operators(apply(PASS, given)[0]) == ["Conv"]


def test_float16() -> None:
    weights = {"w": weight(6, 4, 1, 1, dtype=np.float16), **{k: v.astype(np.float16) for k, v in norm(6).items()}}
    given = model(f"(float16[N,4,H,W] x) => (float16 y) {{ c = Conv(x, w) {BN} }}", weights, opset=15)
    assert operators(apply(PASS, given)[0]) == ["Conv"]


def test_a_row_of_numbers_is_no_channel() -> None:
    given = model(
        "(float[N,4,H,6] x) => (float y) { c = Conv(x, w) y = Mul(c, s) }", {"w": weight(6, 4, 1, 1), "s": weight(6)}
    )
    unchanged(PASS, given)


@pytest.mark.parametrize(
    ("text", "weights", "reason"),
    [
        (f"(float[N,4,H,W] x) => (float y, float c) {{ c = Conv(x, w) {BN} }}", {}, "other users, or is an output"),
        (f"(float[N,4,H,W] x) => (float y, float z) {{ c = Conv(x, w) {BN} z = Conv(x, w) }}", {}, "is shared"),
        (f"(float[N,4,H,W] x, float[6,4,1,1] v) => (float y) {{ c = Conv(x, v) {BN} }}", {}, "is computed"),
        (f"(float[N,4,H,W] x, float[6,4,1,1] w) => (float y) {{ c = Conv(x, w) {BN} }}", {}, "may be overridden"),
        (f"(float[N,4,H,W] x, float[6] mean) => (float y) {{ c = Conv(x, w) {BN} }}", {}, "may be overridden"),
        (
            "(float[N,6,H,W] x) => (float y) { c = BatchNormalization(x, scale, shift, mean, var) y = Conv(c, w) }",
            {"w": weight(4, 6, 1, 1)},
            "precedes its convolution",
        ),
        (
            "(float[N,4,H,W] x) => (float y) { c = Conv(x, w)"
            " y, m, v = BatchNormalization<training_mode=1>(c, scale, shift, mean, var) }",
            {},
            "training mode",
        ),
        (
            f"(float[N,4,H,W] x) => (float y) {{ c = Conv(x, w) {BN} }}",
            {"scale": np.full(6, 1e38, np.float32), "var": np.full(6, 1e-8, np.float32)},
            "not finite",
        ),
    ],
)
def test_refused(text: str, weights: dict[str, Any], reason: str) -> None:
    given = model(text, {"w": weight(6, 4, 1, 1), **norm(6), **weights})
    assert reason in reasons(unchanged(PASS, given))


def test_types_that_differ_are_refused() -> None:
    weights = {"w": weight(6, 4, 1, 1, dtype=np.float16), **norm(6)}
    text = f"(float16[N,4,H,W] x) => (float16 y) {{ c = Conv(x, w) {BN} }}"
    given = model(
        text, {**weights, "scale": norm(6)["scale"].astype(np.float16), "shift": norm(6)["shift"].astype(np.float16)}
    )
    assert "types differ" in reasons(unchanged(PASS, given))
