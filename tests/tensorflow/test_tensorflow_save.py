"""Writing a SavedModel: weights and inputs go to the module in its order, with a TensorFlow of its names alone."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

NAME = "memopt.tensorflow.tasks.tensorflow_save"


@pytest.fixture
def asked(monkeypatch):
    """What TensorFlow was asked to do; its `call_module` returns the sum of the arguments."""
    found = {}

    def call_module(arguments, **options):
        found["arguments"], found["options"] = arguments, options
        return [sum(value.sum() for value in arguments)]

    def function(call, jit_compile):
        assert jit_compile

        def concrete(**specs):
            found["specs"] = specs
            return call

        return SimpleNamespace(get_concrete_function=concrete)

    def save(module, path, signatures):
        found.update(module=module, path=path, serve=signatures["serving_default"])

    tensorflow = ModuleType("tensorflow")
    tensorflow.__version__ = "0"
    tensorflow.Module = lambda name: SimpleNamespace()
    tensorflow.Variable = lambda array, trainable, name: array
    tensorflow.as_dtype, tensorflow.TensorShape = np.dtype, tuple
    tensorflow.cast = lambda value, dtype: value.astype(dtype)
    tensorflow.TensorSpec = lambda shape, dtype, name: (shape, dtype, name)
    tensorflow.function, tensorflow.saved_model = function, SimpleNamespace(save=save)
    python = ModuleType("tensorflow.compiler.tf2xla.python")
    python.xla = SimpleNamespace(call_module=call_module)
    for name in ("tensorflow.compiler", "tensorflow.compiler.tf2xla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "tensorflow", tensorflow)
    monkeypatch.setitem(sys.modules, "tensorflow.compiler.tf2xla.python", python)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield found
    sys.modules.pop(NAME, None)


def test_the_module_gets_its_arguments_in_order_and_in_its_types(asked, tmp_path):
    (tmp_path / "module.bin").write_bytes(b"code")
    variables = {"any/name": np.full(2, 3.0), "bias": np.full(1, 5.0)}
    folder = SimpleNamespace(path=tmp_path, read=lambda name: {"variables": variables}[name])
    request = {
        "version": 9,
        "platforms": ["CPU"],
        "arguments": [("variable", "bias", "float32"), ("input", "x", "int32"), ("variable", "any/name", "float16")],
        "inputs": [{"name": "x", "dtype": "int64", "shape": [None, 2]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": [None]}],
    }  # fmt: skip
    answer = importlib.import_module(NAME).run(request, folder)
    assert answer == {"tensorflow": "0"} and asked["path"] == str(tmp_path / "saved_model")
    assert asked["specs"] == {"x": ([None, 2], np.dtype("int64"), "x")}
    assert asked["serve"](x=np.ones(4)) == {"y": 5 + 4 + 6}
    assert [str(value.dtype) for value in asked["arguments"]] == ["float32", "int32", "float16"]
    assert asked["options"] == {
        "version": 9, "module": b"code", "Tout": [np.dtype("float32")], "Sout": [(None,)], "platforms": ["CPU"],
    }  # fmt: skip
