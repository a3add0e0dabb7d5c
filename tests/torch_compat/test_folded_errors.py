"""A model that asks which packages there are is captured, with those that there are not."""

import importlib.metadata
import importlib.util

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import memopt


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def spec(name):
    try:
        return importlib.util.find_spec(f"{name}.part")
    except ModuleNotFoundError:
        return None


class Asks(nn.Module):
    def __init__(self, known):
        super().__init__()
        self.linear, self.known = nn.Linear(4, 4), known

    def forward(self, x):
        return self.linear(x) * (2 if self.known("no_such_package") else 3)


@pytest.mark.parametrize("known", [version, spec])
def test_a_package_that_is_not_there_is_an_error_of_the_models(known):
    model, x = Asks(known), torch.randn(2, 4)
    torch._dynamo.reset()
    compiled = memopt.compile(model, "1MB", backend="aten")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)
    # Torch 2.11 calls no such function as it traces: its graph ends there, and the step is planned all the same.
    graphs = 1 if TorchVersion(torch.__version__) >= (2, 13) else 2
    assert len(compiled.report.programs) == graphs and not compiled.report.notes


def test_one_that_the_model_does_not_catch_is_raised_as_it_is():
    model = Asks(importlib.metadata.version)
    with pytest.raises(ImportError, match="no_such_package"):
        memopt.compile(model, backend="aten")(torch.randn(2, 4))
