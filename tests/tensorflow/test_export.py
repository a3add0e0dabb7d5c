import json
import os

import pytest
import torch
from torch import nn

import memopt
from memopt import models
from memopt.convert.errors import ConversionError, DifferenceError
from tests.tensorflow.support import needs_tensorflow, script

export = pytest.importorskip("memopt.tensorflow.export", exc_type=ImportError)
pytestmark = needs_tensorflow

SERVE = """
import json, sys
import numpy as np
import tensorflow as tf
loaded = tf.saved_model.load("saved")
function = loaded.signatures["serving_default"]
inputs = {name: np.load(f"{name}.npy") for name in function.structured_input_signature[1]}
for name, value in function(**{name: tf.constant(value) for name, value in inputs.items()}).items():
    np.save(f"out_{name}.npy", value.numpy())
compiled = [node.op for definition in function.graph.as_graph_def().library.function for node in definition.node_def]
print(json.dumps({
    "compiled": compiled.count("XlaCallModule"),
    "names": sorted(function.structured_outputs),
    "variables": len(loaded.weights),
    "torch": sys.modules["torch"] is None and sys.modules["memopt"] is None,
}))
"""


def served(folder, **inputs):
    """The outputs of `folder/saved` by a process in which torch, jax and memopt cannot be imported."""
    numpy = pytest.importorskip("numpy")
    for name, value in inputs.items():
        numpy.save(folder / f"{name}.npy", value.numpy())
    told = json.loads(script(folder, SERVE, block=("torch", "jax", "memopt")))
    assert told["torch"] and told["compiled"] == 1
    outputs = {name: torch.from_numpy(numpy.load(folder / f"out_{name}.npy")) for name in told["names"]}
    return outputs, told


@pytest.mark.parametrize("name", ["bert_base", "mobilenet_v3_small"])
def test_a_bare_tensorflow_serves_what_is_written(tmp_path, name):
    torch.manual_seed(0)
    model = models.build(name, tiny=True).eval()
    inputs = model.example_inputs(2)
    record = memopt.export_tensorflow(model, inputs, tmp_path / "saved")
    assert record.notes == ()
    assert [run.sizes for run in record.runs] == [{"batch": 2}, {"batch": 1}, {"batch": 4}]
    assert [entry.name for entry in record.inputs] == list(inputs)
    assert record.inputs[0].shape[0] is None and record.outputs[0].shape[0] is None
    assert all(output.torch_error is not None for run in record.runs for output in run.outputs)  # beside float64
    assert record.memory["temporaries"] > 0 and record.memory["arguments"] > 0
    assert f"{record.inputs[0].name} " in record.to_text() and json.loads(record.to_json())["output"]
    new = {key: torch.cat([value, value.flip(0), value[:1]]) for key, value in inputs.items()}
    with torch.no_grad():
        expected = model(**new)
    found, _ = served(tmp_path, **new)
    torch.testing.assert_close(found["output"], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert not [entry for entry in os.listdir(tmp_path) if entry.startswith(".")]


class Named(nn.Module):
    """Tied weights, two inputs of which one is not of the batch, outputs by name, an input that nothing reads."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))

    def forward(self, words, scale, unused=None, factor=2):
        hidden = self.second(self.first(words)) * scale * factor
        return {"hidden": hidden, "largest": hidden.argmax(-1), "half": hidden.bfloat16().float()}


def test_names_tied_weights_and_integers(tmp_path):
    model = Named().eval()
    inputs = {"words": torch.randn(3, 5, 8), "scale": torch.rand(8), "unused": torch.arange(3)}
    record = memopt.export_tensorflow(model, inputs, tmp_path / "saved")
    assert [(entry.name, entry.dtype, entry.shape) for entry in record.inputs] == [
        ("words", "float32", (None, 5, 8)),
        ("scale", "float32", (8,)),
        ("unused", "int64", (None,)),
    ]
    assert {entry.name: entry.dtype for entry in record.outputs} == {
        "hidden": "float32",
        "largest": "int64",
        "half": "float32",
    }
    found, told = served(tmp_path, **inputs)
    with torch.no_grad():
        expected = model(**inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    assert told["variables"] <= 4


class Numbered(nn.Module):
    """Makes a constant of the batch's size, as models of transformers do."""

    def forward(self, x):
        return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None]


def test_constants_of_the_batch_vary_with_it():
    record = memopt.export_tensorflow(Numbered(), torch.randn(2, 4), None)
    assert record.notes == () and [run.sizes["batch"] for run in record.runs] == [2, 1, 4]


class Fixed(nn.Module):
    """Its code has another course at each batch."""

    def forward(self, x):
        for _ in range(x.shape[0]):
            x = x.sin()
        return x


def test_a_batch_that_cannot_vary_is_fixed_and_said_to_be(tmp_path):
    record = memopt.export_tensorflow(Fixed(), torch.randn(3, 4), tmp_path / "saved")
    assert record.inputs[0].shape == (3, 4)
    assert len(record.runs) == 1 and "all shapes are fixed" in record.notes[0]
    kept = memopt.export_tensorflow(nn.Linear(4, 4), torch.randn(3, 4), None, dynamic=False)
    assert kept.notes == () and kept.output is None and kept.inputs[0].shape == (3, 4)


def test_what_differs_is_not_written(tmp_path, monkeypatch):
    class Changed(nn.Linear):
        calls = 0

        def forward(self, x):
            return super().forward(x)

    model = Changed(4, 4)
    written = export._save

    def save(artifact, *rest):
        for tensor in artifact.state.values():
            tensor.mul_(1.01)
        result = written(artifact, *rest)
        for tensor in artifact.state.values():
            tensor.div_(1.01)
        return result

    monkeypatch.setattr(export, "_save", save)
    with pytest.raises(DifferenceError, match="output output is off by"):
        memopt.export_tensorflow(model, torch.randn(3, 4), tmp_path / "saved", dynamic=False)
    assert os.listdir(tmp_path) == []


def test_models_that_are_not_functions_are_refused(tmp_path):
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ConversionError, match=r"the model changes .*: put it into eval mode"):
        memopt.export_tensorflow(norm, torch.randn(3, 4), tmp_path / "saved")
    with pytest.raises(ConversionError, match="draws random numbers when it runs: put it into eval mode"):
        memopt.export_tensorflow(nn.Dropout(), torch.randn(3, 4), tmp_path / "saved")
    with pytest.raises(ValueError, match="input x is of type list: only tensors are supported"):
        memopt.export_tensorflow(nn.Identity(), {"x": [torch.ones(2)]}, tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def test_only_a_saved_model_is_replaced(tmp_path):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="choose another name or set overwrite"):
        memopt.export_tensorflow(model, x, tmp_path / "mine")
    with pytest.raises(FileExistsError, match="is no SavedModel: it is not replaced"):
        memopt.export_tensorflow(model, x, tmp_path / "mine", overwrite=True)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        memopt.export_tensorflow(model, x, tmp_path / "no" / "where")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "saved_model.pb").write_text("old")
    (saved / "more").write_text("old")
    memopt.export_tensorflow(model, x, saved, overwrite=True, dynamic=False)
    assert sorted(os.listdir(saved)) == ["assets", "fingerprint.pb", "saved_model.pb", "variables"]
    assert sorted(os.listdir(tmp_path)) == ["mine", "saved"]
    assert (tmp_path / "mine" / "letter.txt").read_text() == "dear"
