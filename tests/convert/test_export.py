"""memopt.export: the command line's conversion as a call."""

import json

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import memopt
from memopt.convert.errors import ConversionError
from tests.convert.onnx_models import saved, sound


class Named(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x, scale=None):
        y = self.second(torch.nn.functional.gelu(self.first(x)))
        return {"y": y if scale is None else y * scale}


@pytest.mark.parametrize("inputs", [torch.ones(3, 4), (torch.ones(3, 4),), {"x": torch.ones(3, 4)}])
def test_a_module_in_all_forms_of_inputs(tmp_path, inputs):
    model, path = Named().eval(), tmp_path / "m.onnx"
    record = memopt.export(model, inputs, path, dynamic="x:0=rows")
    assert record.output == str(path)
    assert [entry.shape for entry in record.inputs] == [("rows", 4)]
    assert record.bytes_after == path.stat().st_size
    assert json.loads(record.to_json())["report"]["output"] == str(path)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    x = torch.randn(5, 4)
    np.testing.assert_allclose(session.run(None, {"x": x.numpy()})[0], model(x)["y"].detach(), rtol=1e-5, atol=1e-6)


def test_keyword_inputs_and_options(tmp_path):
    path = tmp_path / "m.onnx"
    inputs = {"x": torch.ones(3, 4), "scale": torch.ones(2)}
    record = memopt.export(Named(), inputs, path, level=0, opset=18, dynamic="none")
    assert (record.opset, record.passes, record.target) == (18, (), "standard")
    assert [entry.name for entry in record.inputs] == ["x", "scale"]
    assert memopt.export(Named(), inputs, path, overwrite=True, passes=["eliminate_dead"]).passes[0].name == (
        "eliminate_dead"
    )


def test_an_onnx_file(tmp_path):
    source = saved(tmp_path, sound())
    record = memopt.export(source, None, tmp_path / "out.onnx")
    assert [node.op_type for node in onnx.load(tmp_path / "out.onnx").graph.node] == ["MatMul", "Relu"]
    assert memopt.export(str(source), {"x": np.ones((6, 4), np.float32)}, None).output is None
    assert record.runs


@pytest.mark.long
def test_the_engine_s_own_operators(tmp_path):
    model = memopt.models.build("gpt2:tiny").eval()
    plain = memopt.export(model, model.example_inputs(2), tmp_path / "plain.onnx")
    record = memopt.export(model, model.example_inputs(2), tmp_path / "m.onnx", target="onnxruntime")
    assert record.target == "onnxruntime"
    assert record.nodes_after["MultiHeadAttention"] == record.nodes_after["SkipLayerNormalization"] / 2
    assert sum(record.nodes_after.values()) < sum(plain.nodes_after.values())
    domains = {entry.domain for entry in onnx.load(tmp_path / "m.onnx").opset_import}
    assert "com.microsoft" in domains
    assert "(opset 20, for onnxruntime)" in record.to_text()
    assert {entry.domain for entry in onnx.load(tmp_path / "plain.onnx").opset_import} == {""}


def test_what_is_refused(tmp_path):
    path, x = tmp_path / "m.onnx", torch.ones(3, 4)
    path.write_text("mine")
    with pytest.raises(FileExistsError, match=r"m\.onnx exists"):
        memopt.export(Named(), x, path)
    for options, message in (
        ({"target": "tensorrt"}, "unknown target 'tensorrt'"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
        ({"level": 4}, "level is 4"),
        ({"skip": ["fuse_conv"]}, "no pass 'fuse_conv'"),
        ({"passes": ["fuse_quick_gelu"]}, "it is one of target onnxruntime"),
        ({"dynamic": "height"}, "no input has an axis height"),
    ):
        with pytest.raises(ValueError, match=message):
            memopt.export(Named(), x, None, **options)
    with pytest.raises(ValueError, match="shapes of its own"):
        memopt.export(path, None, None, dynamic="batch")
    with pytest.raises(TypeError, match="a module needs example inputs"):
        memopt.export(Named(), None, None)
    with pytest.raises(TypeError, match="give a mapping"):
        memopt.export(path, x, None)
    with pytest.raises(ConversionError, match="is no ONNX model"):
        memopt.export(path, None, None)
    assert path.read_text() == "mine"
