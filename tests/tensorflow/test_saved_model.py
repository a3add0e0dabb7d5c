import json
import os

import pytest

from memopt.convert.errors import ConversionError, DifferenceError
from memopt.tensorflow.process import InputsError, TensorFlowError, UnsafeModelError
from tests.tensorflow.support import TRANSFORMER, needs_tensorflow, script

pytest.importorskip("onnx")
saved_model = pytest.importorskip("memopt.tensorflow.saved_model", exc_type=ImportError)
pytestmark = needs_tensorflow

MODELS = (
    TRANSFORMER
    + """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
keras.Model(*transformer(keras.layers)).export("transformer", verbose=False)
random = np.random.default_rng(0)

class Plain(tf.Module):
    def __init__(self):
        self.w = tf.Variable(random.standard_normal((4, 3)), dtype=tf.float32)

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x"), tf.TensorSpec([], tf.int32, name="by")])
    def scaled(self, x, by):
        y = tf.nn.gelu(x @ self.w)
        return {"y": y * tf.cast(by, tf.float32), "rows": tf.shape(x)[0], "best": tf.argmax(y, axis=-1)}

    @tf.function(input_signature=[tf.TensorSpec([2, 4], tf.float32, name="x")])
    def negative(self, x):
        return {"z": -x}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="words")])
    def words(self, words):
        return {"n": tf.strings.length(words)}

class Writes(tf.Module):
    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def writes(self, x):
        tf.io.write_file("trace.txt", "seen")
        return {"y": x}

plain = Plain()
tf.saved_model.save(plain, "plain", signatures={"serving_default": plain.scaled, "negative": plain.negative})
tf.saved_model.save(plain, "two", signatures={"negative": plain.negative, "scaled": plain.scaled})
tf.saved_model.save(plain, "strings", signatures=plain.words)
writes = Writes()
tf.saved_model.save(writes, "writes", signatures=writes.writes)
"""
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    script(folder, MODELS, backend="tensorflow")
    return folder


def test_a_keras_transformer_becomes_onnx_that_computes_what_tensorflow_does(models, tmp_path):
    onnx = pytest.importorskip("onnx")
    record = saved_model.convert_saved_model(models / "transformer", tmp_path / "m.onnx")
    assert record.opset == 18
    assert [run.sizes for run in record.runs] == [{"batch": 2}, {"batch": 3}, {"batch": 1}]
    assert record.inputs[0].name == "tokens" and record.inputs[0].shape == ("batch", 12)
    assert all(output.torch_error is not None for run in record.runs for output in run.outputs)  # beside float64
    assert sum(record.nodes_after.values()) < sum(record.nodes_before.values())
    model = onnx.load(tmp_path / "m.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert "Erfc" not in {node.op_type for node in model.graph.node}
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_names_and_types_are_the_signature_s(models):
    record = saved_model.convert_saved_model(models / "plain", None)
    assert {entry.name: (entry.dtype, entry.shape) for entry in record.inputs} == {
        "by": ("int32", ()),
        "x": ("float", ("batch", 4)),
    }
    assert {entry.name: entry.dtype for entry in record.outputs} == {"best": "int64", "rows": "int32", "y": "float"}
    other = saved_model.convert_saved_model(models / "two", None, signature="negative")
    assert [entry.name for entry in other.outputs] == ["z"] and len(other.runs) == 1


def test_xla_s_memory_and_time_beside_tensorflow_s(models):
    pytest.importorskip("jax")
    report = saved_model.inspect_saved_model(models / "transformer", batch=3)
    assert report.shapes == {"tokens": (3, 12)} and report.platform in ("cpu", "gpu")
    assert report.before["peak"] > 0 and report.before["seconds"] > 0 and report.after["seconds"] > 0
    assert report.after["arguments"] >= report.weights > 0 and report.after["temporaries"] > 0
    assert report.evidence[0].max_relative < 1e-5
    assert "equal to TensorFlow" in report.to_text() and json.loads(report.to_json())["signature"] == "serving_default"


def test_other_numbers_are_an_error(models, tmp_path, monkeypatch):
    written = saved_model._expectations

    def expectations(answer, folder):
        found = written(answer, folder)
        for item in found:
            item.outputs[0].mul_(1.001)
            item.reference[0].mul_(1.001)
        return found

    monkeypatch.setattr(saved_model, "_expectations", expectations)
    with pytest.raises(DifferenceError, match="output output_0 is off by"):
        saved_model.convert_saved_model(models / "transformer", tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_an_operator_that_onnx_has_not_is_named():
    ir = pytest.importorskip("onnx_ir")
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    node = ir.node("BesselI0", [x], name="bessel")
    graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 18}, name="g")
    with pytest.raises(ConversionError, match=r"tf2onnx wrote BesselI0 \(bessel\), which is no operator of ONNX"):
        saved_model._named(ir.Model(graph, ir_version=8), {"inputs": [], "outputs": []})


@pytest.mark.parametrize(
    ("name", "options", "error", "expected"),
    [
        ("two", {}, InputsError, "has no signature serving_default: it has negative, scaled"),
        ("plain", {"signature": "train"}, InputsError, "has no signature train"),
        ("plain", {"inputs": {"z": (2, 4)}}, InputsError, "there is no input z: the signature takes by, x"),
        ("plain", {"inputs": {"x": (2, 5)}}, InputsError, r"input x is \(None, 4\), not \[2, 5\]"),
        ("strings", {}, InputsError, "input words of .* is string"),
        ("writes", {}, UnsafeModelError, "holds a WriteFile operator"),
        ("broken", {}, TensorFlowError, "is no SavedModel: saved_model.pb cannot be read"),
        ("cut", {}, TensorFlowError, "TensorFlow cannot load"),
    ],
)
def test_what_is_wrong_is_one_line(models, tmp_path, name, options, error, expected):
    for folder in ("broken", "cut"):
        (models / folder).mkdir(exist_ok=True)
    (models / "broken" / "saved_model.pb").write_bytes(b"\xff" * 100)
    (models / "cut" / "saved_model.pb").write_bytes((models / "plain" / "saved_model.pb").read_bytes())
    with pytest.raises(error, match=expected) as caught:
        saved_model.convert_saved_model(models / name, tmp_path / "m.onnx", **options)
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == [] and not (models / "trace.txt").exists()


def test_the_opset_is_one_that_tf2onnx_has(models):
    from memopt.convert.options import Options

    with pytest.raises(ValueError, match="converted to opset 18 at most"):
        saved_model.convert_saved_model(models / "plain", None, options=Options(opset=20))
