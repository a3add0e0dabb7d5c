"""Graphs as functions of TensorFlow: tensors as arrays and back; what they compute, where TensorFlow is installed."""

import importlib
import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.tensorflow.support import needs_tensorflow

pytest.importorskip("jax")
NAME = "memopt.tensorflow.function"


@pytest.fixture
def function(monkeypatch):
    """The module, beside a TensorFlow that has nothing where there is none."""
    if importlib.util.find_spec("tensorflow") is None:
        for name in ("tensorflow", "tensorflow.compiler", "tensorflow.compiler.tf2xla"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        python = ModuleType("tensorflow.compiler.tf2xla.python")
        python.xla = None
        monkeypatch.setitem(sys.modules, python.__name__, python)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_tensors_are_arrays_and_tensors_again(function, dtype):
    tensor = (torch.arange(12).reshape(3, 4) % 2).to(dtype).t()
    array = function._array(tensor, None if dtype is torch.bfloat16 else tensor.contiguous().numpy().dtype)
    found = function._tensor(array)
    assert found.dtype is dtype and found.is_contiguous() and torch.equal(found, tensor)
    assert array.shape == (4, 3) and found.data_ptr() != tensor.data_ptr()


@needs_tensorflow
def test_a_graph_is_computed_by_tensorflow(function):
    x, weight = torch.randn(4, 8), torch.randn(8, 2)
    graph = make_fx(lambda x, weight: ((x @ weight).tanh(), x + 1))(x, weight)
    run = function.function_of(graph, {1: weight})
    for found, expected in zip(run([x, weight]), graph(x, weight), strict=True):
        torch.testing.assert_close(found, expected)
