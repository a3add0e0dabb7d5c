"""A Keras model as torch.export is given it: inputs and outputs by name, sizes that fit, and refusals in words."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

NAME = "memopt.tensorflow.tasks.keras_export"


class Model:
    """As much of a Keras model as is asked."""

    output_names = ("first out", "2nd")

    def __init__(self, **shapes):
        self.inputs = [SimpleNamespace(name=name, shape=shape, dtype="float32") for name, shape in shapes.items()]

    def __call__(self, values, training):
        assert not training
        return values[0] + values[1], values[0] * values[1]


@pytest.fixture
def task(monkeypatch):
    """The task, whose Keras reads any file as `Model`."""
    keras = ModuleType("keras")
    keras.saving = SimpleNamespace(load_model=lambda path, compile, safe_mode: Model(a=(None, 3), b=(None, 3)))
    monkeypatch.setitem(sys.modules, "keras", keras)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("dynamic", [True, False])
def test_a_file_becomes_a_program_of_named_inputs_and_outputs(task, dynamic, tmp_path):
    request = {"path": "model.keras", "batch": 2, "inputs": {}, "dynamic": dynamic}
    assert task.run(request, SimpleNamespace(path=tmp_path)) == {"notes": []}
    program = torch.export.load(tmp_path / "model.pt2").module()
    a, b = (torch.randn(5 if dynamic else 2, 3) for _ in range(2))
    found = program(a=a, b=b)
    assert list(found) == ["first_out", "input_2nd"]
    torch.testing.assert_close(found["input_2nd"], a * b)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"c": [1, 3]}, "there is no input c: the model takes a, b"),
        ({"a": [1, 4]}, r"input a is \?x3, not 1x4"),
        ({"a": [1, 3, 1]}, r"input a is \?x3, not 1x3x1"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(task, given, reason):
    with pytest.raises(task.Inputs, match=f"^{reason}$"):
        task.run({"path": "model.keras", "batch": 2, "inputs": given, "dynamic": True}, None)


def test_a_captured_graph_that_computes_something_else_is_refused(task, tmp_path, monkeypatch):
    captured = task.torch.export.export

    def wrong(wrapper, *rest, **options):
        return captured(task.named(lambda values, training: values[0], wrapper.names), *rest, **options)

    monkeypatch.setattr(task.torch.export, "export", wrong)
    monkeypatch.setattr(Model, "output_names", ("output_0",))
    monkeypatch.setattr(Model, "__call__", lambda self, values, training: values[0] + 1)
    with pytest.raises(ValueError, match="computes another output_0 than Keras, off by 1"):
        task.run({"path": "m.keras", "batch": 2, "inputs": {}, "dynamic": False}, SimpleNamespace(path=tmp_path))
