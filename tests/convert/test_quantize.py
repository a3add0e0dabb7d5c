import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import memopt
from memopt import models
from memopt.convert.errors import ConversionError, DifferenceError
from memopt.convert.lower import ALLOWED
from tests.convert.onnx_models import saved, sound


@pytest.mark.quick("resnet18")
@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert_base", marks=pytest.mark.slow), "resnet18"])
def test_models(tmp_path, name):
    torch.manual_seed(0)
    model = models.build(f"{name}:tiny").eval()
    inputs = model.example_inputs(2)
    wide = memopt.export(model, inputs, tmp_path / "wide.onnx")
    record = memopt.export(model, inputs, tmp_path / "low.onnx", quantize="int8")
    assert record.nodes_after["MatMulInteger"] > 0
    assert record.bytes_after < (0.6 if name != "resnet18" else 1.0) * wide.bytes_after
    worst = max(output.max_relative for run in record.runs for output in run.outputs)
    assert 0 < worst < ALLOWED["int8"] == record.allowed
    assert "8 % of an output's largest value is allowed" in record.notes[-1]
    assert record.passes[-1].name == "quantize_int8"
    onnx.checker.check_model(str(tmp_path / "low.onnx"), full_check=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "low.onnx"), providers=["CPUExecutionProvider"])
    feeds = {entry.name: inputs[entry.name].numpy() for entry in session.get_inputs()}
    expected = model(**inputs).detach().numpy()
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, atol=ALLOWED["int8"] * np.abs(expected).max())


def test_an_onnx_file(tmp_path):
    record = memopt.export(saved(tmp_path, sound()), None, tmp_path / "low.onnx", quantize="int8")
    assert record.nodes_after["MatMulInteger"] == 1
    assert record.runs and record.bytes_after == (tmp_path / "low.onnx").stat().st_size


def test_refusals(tmp_path):
    with pytest.raises(ConversionError, match="nothing in the model can be quantized"):
        memopt.export(torch.nn.ReLU(), torch.ones(3), tmp_path / "m.onnx", quantize="int8")
    with pytest.raises(DifferenceError, match="is off by"):
        memopt.export(torch.nn.Linear(64, 64), torch.randn(4, 64), None, quantize="int8", tolerance=1e-5)
    for options, message in (
        ({"quantize": "int4"}, "use int8"),
        ({"quantize": "int8", "dtype": "fp16"}, "choose one"),
        ({"tolerance": 0.1}, "a tolerance goes with"),
        ({"quantize": "int8", "tolerance": 2.0}, "between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            memopt.export(torch.nn.ReLU(), torch.ones(3), None, **options)
    assert list(tmp_path.iterdir()) == []
