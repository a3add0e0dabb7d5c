"""Running a SavedModel: what TensorFlow is given, asked and answers, with a TensorFlow of its names alone."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

NAME = "memopt.tensorflow.tasks.tensorflow_run"


class OpError(Exception):
    """What TensorFlow raises."""


class Folder:
    """Tensors by the name of their file."""

    def __init__(self, **files):
        self.files = files

    def read(self, name):
        return self.files[name]

    def write(self, name, arrays):
        self.files[name] = arrays


def buffer(size, **kinds):
    found = dict.fromkeys(("is_entry_computation_parameter", "is_constant", "maybe_live_out"), False)
    return SimpleNamespace(size=size, **{**found, **kinds})


BUFFERS = [
    buffer(1, is_entry_computation_parameter=True, maybe_live_out=True),
    buffer(2, is_constant=True),
    buffer(4, maybe_live_out=True),
    buffer(8),
    buffer(16),
]


@pytest.fixture
def task(monkeypatch):
    """The task, whose TensorFlow has one signature: it doubles `x`, and cannot do so with what is negative."""

    def double(x):
        if (x < 0).any():
            raise OpError("Graph execution error:\n\n  Detected at node 'a'\n  negative numbers\nmore")
        return {"y": SimpleNamespace(numpy=lambda: 2 * x)}

    class Proto:
        def ParseFromString(self, text):
            self.buffer_assignment = SimpleNamespace(buffer_allocations=BUFFERS)

    def function(call, jit_compile):
        assert jit_compile
        return SimpleNamespace(experimental_get_compiler_ir=lambda **given: lambda stage: b"")

    tensorflow = ModuleType("tensorflow")
    loaded = SimpleNamespace(signatures={"serve": double})
    tensorflow.saved_model = SimpleNamespace(load=lambda path: loaded)
    tensorflow.constant, tensorflow.errors, tensorflow.function = np.asarray, SimpleNamespace(OpError=OpError), function
    service = ModuleType("tensorflow.compiler.xla.service")
    service.hlo_pb2 = SimpleNamespace(HloProto=Proto)
    for name in ("tensorflow.compiler", "tensorflow.compiler.xla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    monkeypatch.setitem(sys.modules, "tensorflow.compiler.xla.service", service)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


REQUEST = {"path": "there", "signature": "serve", "sets": 2}


def test_each_set_is_run_twice_and_its_outputs_are_written(task):
    folder = Folder(inputs_0={"x": np.ones(3)}, inputs_1={"x": np.zeros(5)})
    answer = task.run(REQUEST, folder)
    assert folder.files["outputs_0"]["y"].tolist() == [2.0] * 3 and folder.files["outputs_1"]["y"].shape == (5,)
    assert len(answer["first"]) == len(answer["later"]) == 2 and min(answer["first"] + answer["later"]) >= 0


def test_memory_is_told_by_what_it_is_for(task):
    answer = task.run({**REQUEST, "sets": 1}, Folder(inputs_0={"x": np.ones(3)}))
    assert answer["memory"] == {"arguments": 1, "constants": 2, "outputs": 4, "temporaries": 24}


def test_of_an_error_the_line_is_told_that_says_why(task):
    with pytest.raises(ValueError, match=r"TensorFlow cannot run it: negative numbers$"):
        task.run(REQUEST, Folder(inputs_0={"x": -np.ones(3)}))
