import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from memopt import models
from memopt.convert import pipeline
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.narrow import ALLOWED, narrowed
from memopt.convert.pipeline import Options, convert_module
from tests.convert.onnx_models import sound


@pytest.mark.parametrize("name", ["gpt2", "resnet18", "llama_1b", "unet"])
def test_models_in_float16(tmp_path, name):
    model = models.build(f"{name}:tiny").eval()
    inputs = model.example_inputs(2)
    wide = convert_module(model, inputs, tmp_path / "wide.onnx")
    record = convert_module(model, inputs, tmp_path / "half.onnx", options=Options(half=True))
    assert record.bytes_after < 0.75 * wide.bytes_after
    assert record.outputs[0].dtype == "float"
    assert "computed in float16" in record.notes[-1]
    worst = max(output.max_relative for run in record.runs for output in run.outputs)
    assert 1e-5 < worst < ALLOWED
    onnx.checker.check_model(str(tmp_path / "half.onnx"), full_check=True)
    types = {tensor.data_type for tensor in onnx.load(tmp_path / "half.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT16 in types


def test_more_than_rounding_is_refused(tmp_path, monkeypatch):
    def spoiled(model):
        model = narrowed(model)
        weight = max(model.graph.initializers.values(), key=lambda value: value.const_value.nbytes)
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float16(1.1), name=weight.name)
        return model

    monkeypatch.setattr(pipeline, "narrowed", spoiled)
    with pytest.raises(DifferenceError, match="is off by"):
        convert_module(
            torch.nn.Linear(64, 64), {"input": torch.randn(4, 64)}, tmp_path / "m.onnx", options=Options(half=True)
        )
    assert list(tmp_path.iterdir()) == []


def test_weights_that_float16_cannot_hold():
    with pytest.raises(ConversionError, match="w holds values above 65504"):
        narrowed(ir.from_proto(sound(value=1e5)))
