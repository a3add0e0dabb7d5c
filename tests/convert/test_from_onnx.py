import os

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from memopt.convert import from_onnx
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.from_onnx import at_opset, convert_onnx
from memopt.convert.onnx_file import external_files
from memopt.convert.pipeline import Options
from memopt.onnx.engines import OnnxRuntime
from memopt.onnx.load import prepare
from memopt.onnx.read import opset
from tests.convert.onnx_models import external, saved, sound
from tests.onnx.build import model
from tests.onnx.build import model as built


def run(path, **feeds):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds)


def test_a_model_is_rewritten_and_compared(tmp_path):
    path, output = saved(tmp_path, sound()), tmp_path / "out.onnx"
    record = convert_onnx(path, output)
    assert [node.op_type for node in onnx.load(output).graph.node] == ["MatMul", "Relu"]
    assert record.nodes_before == {"Identity": 1, "MatMul": 1, "Relu": 1, "Sqrt": 1, "Transpose": 1}
    assert record.nodes_after == {"MatMul": 1, "Relu": 1}
    assert (record.bytes_before, record.bytes_after) == (path.stat().st_size, output.stat().st_size)
    assert record.bytes_after <= record.bytes_before
    assert len({run.sizes["rows"] for run in record.runs}) == 3
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    np.testing.assert_array_equal(run(path, x=x)[0], run(output, x=x)[0])


def test_weights_beside_the_model(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    record = convert_onnx(external(tmp_path), folder / "out.onnx", options=Options(external_above=0))
    assert sorted(os.listdir(folder)) == ["out.onnx", "out.onnx.data"]
    assert external_files(folder / "out.onnx") == {"out.onnx.data"}
    assert record.runs
    assert run(folder / "out.onnx", x=np.ones((1, 4), np.float32))[0].tolist() == [[8.0] * 32]


@pytest.mark.parametrize("beside", [True, False])
def test_without_passes_the_model_stays_as_it_was(tmp_path, beside):
    path = external(tmp_path) if beside else saved(tmp_path, sound())
    record = convert_onnx(path, tmp_path / "out.onnx", options=Options(passes=()))
    assert record.notes == ("nothing was rewritten",)
    assert record.runs == ()
    assert "it is the source" in record.to_text()
    assert beside or (tmp_path / "out.onnx").read_bytes() == path.read_bytes()
    assert run(tmp_path / "out.onnx", x=np.ones((1, 4), np.float32))[0].tolist() == [[8.0] * 32]


def growing():
    """A constant that is small to say and large to store."""
    shape = numpy_helper.from_array(np.array([16, 16]), "shape")
    nodes = [
        helper.make_node("ConstantOfShape", ["shape"], ["c"], value=numpy_helper.from_array(np.ones(1, np.float32))),
        helper.make_node("Add", ["x", "c"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [16, 16]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [shape])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_a_model_never_grows_unless_asked(tmp_path):
    path, output = saved(tmp_path, growing()), tmp_path / "out.onnx"
    record = convert_onnx(path, output)
    assert output.stat().st_size <= path.stat().st_size
    larger = convert_onnx(path, tmp_path / "larger.onnx", options=Options(allow_larger=True))
    assert larger.bytes_after >= record.bytes_after
    assert run(output, x=np.ones((16, 16), np.float32))[0][0, 0] == 2


def test_another_file_than_the_proved_model_is_refused(tmp_path, monkeypatch):
    real = from_onnx.rewritten

    def spoiled(*args, **kwargs):
        model, records, notes = real(*args, **kwargs)
        model.graph.initializers[next(iter(model.graph.initializers))].const_value = ir.tensor(
            np.ones((4, 32), np.float32)
        )
        return model, records, notes

    monkeypatch.setattr(from_onnx, "rewritten", spoiled)
    with pytest.raises(DifferenceError, match=r"the written file computes other numbers"):
        convert_onnx(saved(tmp_path, sound()), tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["in.onnx"]


def test_random_numbers_cannot_be_compared(tmp_path):
    model = sound()
    model.graph.node.append(helper.make_node("RandomNormalLike", ["x"], ["noise"]))
    model.graph.output.append(helper.make_tensor_value_info("noise", TensorProto.FLOAT, ["rows", 4]))
    with pytest.raises(ConversionError, match=r"cannot be compared: .*random"):
        convert_onnx(saved(tmp_path, model), tmp_path / "out.onnx")
    assert os.listdir(tmp_path) == ["in.onnx"]


def test_values_larger_than_the_machine_are_refused_before_anything_runs(tmp_path):
    model = sound(rows=2**45)
    with pytest.raises(ConversionError, match=r"would take .* more than half of this machine's memory"):
        convert_onnx(saved(tmp_path, model), tmp_path / "out.onnx")


def test_a_cycle_is_refused(tmp_path):
    model = sound()
    model.graph.node[0].input[0] = "product"
    with pytest.raises(ConversionError, match=r"in.onnx: .*(reads product before|not output of any previous)"):
        convert_onnx(saved(tmp_path, model), tmp_path / "out.onnx")


@pytest.mark.parametrize(("name", "opset"), [("float16", 20), ("bfloat16", 22)])
def test_files_in_lower_precision_are_rewritten_in_it(tmp_path, name, opset):
    nodes = "i = Identity(x) a = MatMul(i, w) b = Tanh(a) c = Dropout(b) y = Sigmoid(c)"
    text = f"({name}[N,16] x) => ({name}[N,8] y) {{ {nodes} }}"
    kind = getattr(ir.DataType, name.upper())
    given = built(text, opset=opset)
    weight = np.random.default_rng(0).standard_normal((16, 8)).astype(kind.numpy())
    given.graph.initializer.append(ir.to_proto(ir.Tensor(weight, dtype=kind, name="w")))
    onnx.save(given, tmp_path / "in.onnx")
    record = convert_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert [node.op_type for node in written.graph.node] == ["MatMul", "Tanh", "Sigmoid"]
    assert [item.data_type for item in written.graph.initializer] == [int(kind)]
    assert record.runs and max(item.max_abs for run in record.runs for item in run.outputs) == 0.0
    assert any("was not run" in note for note in record.notes) is (name == "bfloat16")
    with pytest.raises(ConversionError, match="stays in its own precision"):
        convert_onnx(tmp_path / "in.onnx", None, options=Options(dtype="fp32"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "other"], "has no input other: its inputs are a, b"),
        (["a", "s"], "needs a value of each input: b is missing"),
        ([], "needs a value of each input: a, b is missing"),
    ],
)
def test_inputs_of_other_names_and_missing_ones(tmp_path, names, message):
    text = "(float[2] a, float[2] b, float[2] s) => (float[2] y) { c = Identity(a) d = Add(c, b) y = Mul(d, s) }"
    onnx.save(built(text, {"s": np.ones(2, np.float32)}), tmp_path / "in.onnx")
    given = {name: np.ones(2, np.float32) for name in names}
    with pytest.raises(ValueError) as caught:
        convert_onnx(tmp_path / "in.onnx", tmp_path / "out.onnx", inputs=given)
    assert str(caught.value) == f"{tmp_path / 'in.onnx'} {message}" and not (tmp_path / "out.onnx").exists()
    given = {name: np.ones(2, np.float32) for name in ("a", "b")}
    assert convert_onnx(tmp_path / "in.onnx", None, inputs=given).runs


SUMS = "(float[2,3] x) => (float[2] y) { a = Relu(x) y = ReduceSum<keepdims=0>(a, axes) }"


@pytest.mark.parametrize("version", [18, 21, 23, 25])
def test_a_graph_computes_the_same_at_another_operator_set(version):
    given = prepare(model(SUMS, {"axes": np.array([1])}, opset=17))
    found = at_opset(given, version)
    assert opset(found) == version and opset(given) == 17 and all(node.name for node in found.graph)
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    assert np.array_equal(OnnxRuntime(found).run({"x": x})[0], OnnxRuntime(given).run({"x": x})[0])


@pytest.mark.parametrize("version", [12, 0, 10**4])
def test_a_version_that_cannot_be_had(version):
    given = prepare(model("(float[2,3] x) => (float[2,3] y) { y = LayerNormalization(x, s) }", {"s": np.ones(3, "f")}))
    with pytest.raises(ConversionError, match=rf"operator set {version}\b") as caught:
        at_opset(given, version)
    assert "\n" not in str(caught.value)


def test_weights_that_one_message_cannot_hold(monkeypatch):
    given = prepare(model(SUMS, {"axes": np.array([1])}, opset=17))
    monkeypatch.setattr(from_onnx, "SINGLE_FILE_BYTES", 7)
    with pytest.raises(ConversionError, match="weights above 7 bytes"):
        at_opset(given, 18)
