"""Graphs of lower precision: each result rounded by itself, whatever stands beside its operator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from memopt.onnx.emulate import Emulated, narrow_types
from memopt.onnx.engines import EngineError
from memopt.onnx.load import prepare
from memopt.onnx.manager import OnnxPassManager
from memopt.onnx.passes import STANDARD
from tests.onnx.build import model

KINDS = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def built(text: str, kind: str, **weights: tuple[int, ...]) -> onnx.ModelProto:
    """A model whose T is the type; its weights are random."""
    found = model(text.replace("T[", f"{kind}["), opset=22)
    random = np.random.default_rng(0)
    for name, shape in weights.items():
        array = ir.Tensor(random.standard_normal(shape).astype(KINDS[kind]), name=name)
        found.graph.initializer.append(ir.to_proto(array))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_types_of_inputs_and_outputs_stay(kind: str) -> None:
    given = prepare(built("(T[3,4] x, T[4] b) => (T[3,4] y, float[3,4] z) { y = Add(x, b) z = Cast<to=1>(x) }", kind))
    x, b = np.arange(12).reshape(3, 4).astype(KINDS[kind]), np.array([1e-3, 1, 2, 300], KINDS[kind])
    y, z = Emulated(given).run({"x": x, "b": b})
    assert y.dtype == KINDS[kind] and z.dtype == np.float32
    np.testing.assert_array_equal(y, (x.astype(np.float32) + b.astype(np.float32)).astype(KINDS[kind]))
    np.testing.assert_array_equal(z, x.astype(np.float32))
    assert {item.name.lower() for item in narrow_types(given)} == {kind}


@pytest.mark.parametrize("kind", KINDS)
def test_each_result_is_rounded(kind: str) -> None:
    text = "(T[8,64] x) => (T[8,64] y) { a = MatMul(x, w) i = Identity(a) c = Tanh(i) y = Sub(c, a) }"
    x = np.random.default_rng(1).standard_normal((8, 64)).astype(KINDS[kind])
    proto = built(text, kind, w=(64, 64))
    w = ir.from_proto(proto.graph.initializer[0]).numpy().astype(np.float32)
    (found,) = Emulated(prepare(proto)).run({"x": x})
    product = (x.astype(np.float32) @ w).astype(KINDS[kind]).astype(np.float32)
    bounded = np.tanh(product).astype(KINDS[kind]).astype(np.float32)
    expected = (bounded - product).astype(KINDS[kind]).astype(np.float32)
    step = float(ml_dtypes.finfo(KINDS[kind]).eps) * np.abs(expected).max()
    assert np.abs(found.astype(np.float32) - expected).max() <= step


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_and_casts(kind: str) -> None:
    number = {"float16": 10, "bfloat16": 16}[kind]
    text = f"""(T[4,6] x) => (T[4,3] y, float[4,3] z) {{
        halves = SplitToSequence<axis=1>(x, three)
        at = Constant<value_int=1>()
        part = SequenceAt(halves, at)
        two = Cast<to={number}>(four)
        y = Mul(part, two)
        z = Cast<to=1>(y)
    }}"""
    proto = built(text, kind)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3), "three"))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(4.0, np.float32), "four"))
    x = np.arange(24).reshape(4, 6).astype(KINDS[kind])
    y, z = Emulated(prepare(proto)).run({"x": x})
    np.testing.assert_array_equal(y.astype(np.float32), x[:, 3:].astype(np.float32) * 4)
    np.testing.assert_array_equal(z, y.astype(np.float32))
    assert y.dtype == KINDS[kind]


def test_graphs_within_nodes_are_refused() -> None:
    text = """(T[4] x, bool c) => (T[4] y) {
        y = If (c) <then_branch = t () => (T[4] p) { p = Neg(x) }, else_branch = e () => (T[4] q) { q = Abs(x) }>
    }"""
    with pytest.raises(EngineError, match="holds a graph with numbers of lower precision"):
        Emulated(prepare(built(text, "float16")))


@pytest.mark.parametrize("kind", KINDS)
def test_passes_that_promise_the_same_bits_are_held_to_it(kind: str) -> None:
    text = """(T[9,16] x) => (T[9,8] y) {
        i = Identity(x) a = MatMul(i, w) b = Identity(a) c = Add(b, v) d = Identity(c)
        e = Tanh(d) f = Identity(e) g = MatMul(f, u) h = Identity(g) y = Sigmoid(h)
    }"""
    proto = built(text, kind, w=(16, 32), v=(32,), u=(32, 8))
    after, records = OnnxPassManager(STANDARD).run(proto)
    assert "Identity" not in [node.op_type for node in after.graph]
    evidence = [record.evidence for record in records if record.name == "eliminate_no_ops" and record.changes]
    assert evidence[0] is not None and evidence[0].engine == Emulated.name and evidence[0].max_abs_error == 0.0
