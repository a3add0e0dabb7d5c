import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import memopt
from memopt import models
from memopt.convert import lower
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.lower import ALLOWED
from memopt.convert.narrow import Narrowed, narrowed
from memopt.convert.verify import Runner
from memopt.onnx.engines import OnnxRuntime
from memopt.onnx.load import prepare
from memopt.onnx.read import constant
from tests.convert.onnx_models import saved, sound
from tests.onnx.build import model as built

HALF, BRAIN = ir.DataType.FLOAT16, ir.DataType.BFLOAT16


QUICK = {("gpt2", "bf16"), ("resnet18", "fp16"), ("unet", "fp16"), ("unet", "bf16")}
MODELS = [
    pytest.param(name, dtype, marks=[] if (name, dtype) in QUICK else pytest.mark.slow)
    for name in ("gpt2", "resnet18", "llama_1b", "unet")
    for dtype in ("fp16", "bf16")
]


@pytest.mark.quick("unet-bf16")
@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_models(tmp_path, name, dtype):
    torch.manual_seed(0)
    model = models.build(f"{name}:tiny").eval()
    inputs = model.example_inputs(2)
    wide = memopt.export(model, inputs, tmp_path / "wide.onnx")
    record = memopt.export(model, inputs, tmp_path / "low.onnx", dtype=dtype)
    assert record.bytes_after < 0.8 * wide.bytes_after
    assert [entry.dtype for entry in (*record.inputs, *record.outputs)] == [
        entry.dtype for entry in (*wide.inputs, *wide.outputs)
    ]
    assert f"operators compute in {'float16' if dtype == 'fp16' else 'bfloat16'}" in " ".join(record.notes)
    worst = max(output.max_relative for run in record.runs for output in run.outputs)
    assert 1e-5 < worst < ALLOWED[dtype] == record.allowed
    assert f"within {100 * record.allowed:.2g} % of the source" in record.to_text()
    onnx.checker.check_model(str(tmp_path / "low.onnx"), full_check=True)
    types = {tensor.data_type for tensor in onnx.load(tmp_path / "low.onnx").graph.initializer}
    assert (onnx.TensorProto.FLOAT16 if dtype == "fp16" else onnx.TensorProto.BFLOAT16) in types
    kept = {refusal.node: refusal.reason for refusal in record.passes[-1].refusals}
    assert ("it is sensitive to rounding" in kept.values()) == (name != "unet")  # which has nothing that is


def casts(model):
    return [node for node in model.graph if node.op_type == "Cast"]


def types_of(result: Narrowed):
    return {node.op_type: node.outputs[0].dtype for node in result.model.graph if node.op_type != "Cast"}


def test_sensitive_operators_stay_and_weights_are_stored_once():
    text = "(float[B,4] x) => (float[B,4] y) { a = MatMul(x, w) b = Softmax(a) c = MatMul(b, w) y = Add(c, w0) }"
    given = built(text, {"w": np.eye(4, dtype=np.float32), "w0": np.ones(4, np.float32)}, opset=20)
    found = narrowed(given, HALF)
    assert types_of(found) == {"MatMul": HALF, "Softmax": ir.DataType.FLOAT, "Add": HALF}
    assert len(casts(found.model)) == 4  # in, before and after the softmax, out
    assert {value.dtype for value in found.model.graph.initializers.values()} == {HALF}
    assert [value.name for value in found.model.graph.outputs] == ["y"]
    assert [(item.reason) for item in found.refusals] == ["it is sensitive to rounding"]
    assert found.summary == "3 operators compute in float16; 1 stay in float32"


def test_numbers_that_do_not_fit_keep_what_they_reach_in_float32():
    text = (
        "(float[4,4] x, bool[4,4] m) => (float[4,4] y) "
        "{ a = MatMul(x, x) b = Where(m, zero, least) c = Add(a, b) d = Tanh(c) e = Add(d, tiny) y = MatMul(e, x) }"
    )
    numbers = {"zero": np.float32(0), "least": np.float32(-3.4e38), "tiny": np.float32(1e-12)}
    found = narrowed(built(text, numbers, opset=20), HALF)
    wide = [node.op_type for node in found.model.graph if node.op_type != "Cast" and node.outputs[0].dtype is not HALF]
    assert wide == ["Where", "Add", "Tanh", "Add"]
    reasons = [item.reason for item in found.refusals]
    assert reasons[0] == "least holds numbers that float16 cannot hold"
    assert reasons[1] == "b holds numbers that float16 cannot hold"
    assert reasons[3] == "tiny is a number that vanishes in float16"
    x, m = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), np.eye(4, dtype=bool)
    given = prepare(built(text, numbers, opset=20))
    before, after = (OnnxRuntime(item).run({"x": x, "m": m})[0] for item in (given, found.model))
    np.testing.assert_allclose(after, before, atol=5e-3)
    assert not narrowed(given, BRAIN).refusals


@pytest.mark.parametrize(
    ("end", "hides"),
    [
        ("d = Unsqueeze(b, zero_axis) e = Add(s, d) y = Softmax(e)", True),
        ("e = Add(s, b) f = Softmax(e) y = Unsqueeze(f, zero_axis)", True),
        ("e = Add(s, b) f = Softmax(e) g = Add(f, e) y = Unsqueeze(g, zero_axis)", False),
        ("e = Mul(s, b) f = Softmax(e) y = Unsqueeze(f, zero_axis)", False),
        ("y = Unsqueeze(b, zero_axis)", False),
    ],
)
def test_what_hides_places_from_a_softmax_is_brought_within_float16(end, hides):
    text = f"(float[4,4] x, bool[4,4] m) => (float[1,4,4] y) {{ s = MatMul(x, x) b = Where(m, zero, least) {end} }}"
    numbers = {"zero": np.float32(0), "least": np.float32(-3.4e38), "zero_axis": np.array([0], np.int64)}
    given = prepare(built(text, numbers, opset=20))
    found = narrowed(given, HALF)
    (where,) = [node for node in found.model.graph if node.op_type == "Where"]
    assert (where.outputs[0].dtype is HALF) is hides
    least = constant(where.inputs[2])
    assert float(least) == (-65504.0 if hides else np.float32(-3.4e38))
    x, m = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), np.eye(4, dtype=bool)
    if hides:
        before, after = (OnnxRuntime(item).run({"x": x, "m": m})[0] for item in (given, found.model))
        np.testing.assert_allclose(after, before, atol=5e-3)
        assert np.array_equal(after == 0, before == 0)


def test_what_stands_between_nodes_in_float32_and_what_has_no_form():
    text = "(float[4,4] x) => (float[4,4] y) { a = Exp(x) b = Transpose(a) c = Softmax(b) y = Relu(c) }"
    found = narrowed(built(text, {}, opset=20), HALF)
    assert "it stands between nodes in float32" in [item.reason for item in found.refusals]
    conv = "(float[1,4,4,4] x) => (float[1,4,4,4] y) { a = Conv(x, w) y = Relu(a) }"
    weight = {"w": np.ones((4, 4, 1, 1), np.float32)}
    reasons = [item.reason for item in narrowed(built(conv, weight, opset=20), BRAIN).refusals]
    assert reasons == ["operator set 20 has no Conv in bfloat16"]
    assert not narrowed(built(conv, weight, opset=22), BRAIN).refusals
    with pytest.raises(ConversionError, match="no operator of the model can be computed in float16: it is sensitive"):
        narrowed(built("(float[4] x) => (float[4] y) { y = Exp(x) }", {}, opset=20), HALF)


def test_a_value_that_graphs_within_nodes_read_stays_for_them():
    text = """(float[4,4] x, bool c) => (float[4,4] y) {
        a = MatMul(x, x)
        b = If (c) <then_branch = t () => (float[4,4] p) { p = Identity(a) },
                    else_branch = e () => (float[4,4] q) { q = Neg(a) }>
        y = MatMul(b, a)
    }"""
    given = prepare(built(text, {}, opset=20))
    found = narrowed(given, HALF)
    assert [item.reason for item in found.refusals] == ["it holds graphs"]
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    for c in (True, False):
        before, after = (OnnxRuntime(item).run({"x": x, "c": np.array(c)})[0] for item in (given, found.model))
        np.testing.assert_allclose(after, before, atol=3e-2)


@pytest.mark.parametrize(("kind", "dtype"), [(BRAIN, torch.bfloat16), (HALF, torch.float16)])
def test_the_emulation_rounds_every_result(kind, dtype):
    text = "(float[64,64] x) => (float[64,64] y) { a = MatMul(x, w) y = Tanh(a) }"
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    low = narrowed(built(text, {"w": weight}, opset=20), kind)
    x = torch.randn(64, 64)
    (found,) = Runner(low.model)({"x": x})
    product = x.to(dtype).float() @ torch.from_numpy(weight).to(dtype).float()
    expected = product.to(dtype).float().tanh().to(dtype).float()
    assert torch.equal(found, found.to(dtype).float())
    assert (found - expected).abs().max() <= torch.finfo(dtype).eps


def test_numbers_beyond_float16_on_the_way_are_found_though_the_cpu_does_without(tmp_path):
    class Far(torch.nn.Module):
        def forward(self, x):
            return (x * 300.0) * x.abs() * 0.001

    x = torch.full((2, 4), 30.0)
    memopt.export(Far(), x, None)
    with pytest.raises(DifferenceError, match="NaN or infinite"):
        memopt.export(Far(), x, None, dtype="fp16")
    memopt.export(Far(), x, None, dtype="bf16")


def test_an_onnx_file(tmp_path):
    source = saved(tmp_path, sound())
    for dtype, size in (("fp16", 2), ("bf16", 2)):
        record = memopt.export(source, None, tmp_path / f"{dtype}.onnx", dtype=dtype)
        weights = list(onnx.load(tmp_path / f"{dtype}.onnx").graph.initializer)
        assert sum(len(value.raw_data) for value in weights) == 32 * 4 * size
        assert record.runs and record.allowed == ALLOWED[dtype]
    assert memopt.export(source, None, tmp_path / "new.onnx", opset=22).opset == 22
    assert onnx.load(tmp_path / "new.onnx").opset_import[0].version == 22


def test_more_than_is_allowed_is_refused(tmp_path, monkeypatch):
    layer, x = torch.nn.Linear(64, 64), {"input": torch.randn(4, 64)}
    with pytest.raises(DifferenceError, match="is off by"):
        memopt.export(layer, x, tmp_path / "m.onnx", dtype="bf16", tolerance=1e-6)

    def spoiled(model, kind):
        found = narrowed(model, kind)
        weight = max(found.model.graph.initializers.values(), key=lambda value: value.const_value.nbytes)
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float16(1.1), name=weight.name)
        return found

    monkeypatch.setattr(lower, "narrowed", spoiled)
    with pytest.raises(DifferenceError, match="is off by"):
        memopt.export(layer, x, tmp_path / "m.onnx", dtype="fp16")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_float16_cannot_hold_stay():
    found = narrowed(ir.from_proto(sound(value=1e5)), HALF)
    reasons = [item.reason for item in found.refusals]
    assert reasons[:2] == [f"{name} holds numbers that float16 cannot hold" for name in ("w", "turned")]
    assert {value.dtype for value in found.model.graph.initializers.values()} == {ir.DataType.FLOAT}
