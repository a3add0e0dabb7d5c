"""The float64 evaluation beside ONNX Runtime, for each operator that it does not take from the reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from memopt.onnx import prepare
from memopt.onnx.engines import EngineError, OnnxRuntime
from memopt.onnx.float64 import Float64
from tests.onnx.build import model, weight

WEIGHTS = {
    "w": weight(6, 4, 3, 3),
    "g": weight(6, 2, 3, 3, seed=1),
    "t": weight(4, 3, 3, 3, seed=2),
    "b": weight(6, seed=3),
    "v": np.abs(weight(4, seed=4)) + 0.5,
    "u": weight(4, seed=5),
    "r": weight(7, seed=6),
    "i": np.random.default_rng(0).integers(-7, 7, (2, 3, 9, 40)),
    "half": np.float16(0.5),
}
X = "float[2,4,9,7] x"


@pytest.mark.parametrize(
    ("node", "opset"),
    [
        ("y = Conv<pads=[1,0,2,1], strides=[2,1], dilations=[1,2]>(x, w, b)", 18),
        ('y = Conv<group=2, auto_pad="SAME_LOWER", strides=[2,2]>(x, g)', 18),
        ('y = Conv<auto_pad="SAME_UPPER">(x, w)', 18),
        ("y = ConvTranspose<group=2, strides=[2,3], pads=[1,0,0,2], output_padding=[1,2]>(x, t, b)", 18),
        ("y = ConvTranspose<group=2, dilations=[2,1]>(x, t)", 18),
        ("y = MaxPool<kernel_shape=[3,2], pads=[1,0,1,1], strides=[2,1]>(x)", 18),
        ("y = MaxPool<kernel_shape=[3,2], ceil_mode=1, strides=[2,2]>(x)", 18),
        ("y = AveragePool<kernel_shape=[3,2], pads=[1,0,1,1], strides=[2,1]>(x)", 18),
        ("y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)", 18),
        ("y = LRN<size=3, alpha=0.1>(x)", 18),
        ("y = BatchNormalization<epsilon=0.01>(x, u, u, u, v)", 9),
        ("y = LayerNormalization(x, r, r)", 18),
        ("y = LayerNormalization<axis=2, epsilon=0.1>(x, r)", 18),
        ("y = RMSNormalization(x, r)", 23),
        ("y = Softmax(x)", 9),
        ("y = Softmax<axis=2>(x)", 11),
        ("y = Softmax<axis=1>(x)", 13),
        ("y = Erf(x)", 18),
        ("y = Gelu(x)", 20),
        ('y = Gelu<approximate="tanh">(x)', 20),
        ("y = GatherElements<axis=3>(x, i)", 18),
    ],
)
def test_beside_onnx_runtime(node: str, opset: int) -> None:
    given = prepare(model(f"({X}) => (float y) {{ {node} }}", WEIGHTS, opset=opset))
    feeds = {"x": weight(2, 4, 9, 7, seed=9)}
    (wide,), (narrow,) = Float64(given).run(feeds), OnnxRuntime(given).run(feeds)
    assert wide.dtype == np.float64 and narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, wide, rtol=2e-4, atol=2e-5)


def test_types_are_widened_everywhere_and_the_model_is_not_edited() -> None:
    text = (
        "(float16[N] x) => (float16[N] y) { a = Cast<to=1>(x) c = Constant<value_float=0.1>() d = Mul(a, c)"
        " e = Cast<to=10>(d) y = Mul(e, half) }"
    )
    given = model(text, WEIGHTS)
    before = given.SerializeToString(deterministic=True)
    prepared = prepare(given)
    (found,) = Float64(prepared).run({"x": np.array([3.0], np.float16)})
    assert found[0] == 3.0 * float(np.float32(0.1)) * 0.5
    assert given.SerializeToString(deterministic=True) == before
    assert prepared.graph.inputs[0].dtype is not None and prepared.graph.inputs[0].dtype.name == "FLOAT16"


@pytest.mark.parametrize(
    "text",
    [
        "(float[N] x) => (float[N] y) { q = QuantizeLinear(x, s) y = DequantizeLinear(q, s) }",
        "(float[N] x) => (float[N] y) { y = custom.Thing(x) }",
    ],
)
def test_what_rounds_or_is_unknown_has_no_truth(text: str) -> None:
    given: onnx.ModelProto = model(text, {"s": np.float32(0.5)}, custom=1)
    with pytest.raises(EngineError, match="not evaluated in float64"):
        Float64(prepare(given))
