"""Faults that are planted into emitted code: `verify="full"` sees each; what is compared is returned to."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.backends.aten import AtenBackend
from memopt.backends.inductor import InductorBackend
from memopt.calls.verified import ModelError
from tests.calls.test_outcome import Cache, Model, X

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.quick("aten-0.5")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_what_is_compared_is_returned_to(backend, dropout):
    model = Model(dropout)
    outputs = memopt.compile(model, backend=backend, verify="full")(X)
    left = model.seen, model.stats, list(model.recent), model.cache.count, model._count
    assert left == ([1], {"calls": 1}, [1], 1, 1) and model.kept is outputs["y"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dropout or torch.allclose(model.total, outputs["y"].detach().sum(0))


class Reads(torch.autograd.Function):
    """A backward that reads something as it is then."""

    @staticmethod
    def forward(ctx, y, read):
        ctx.read, ctx.before = read, float(read.detach().sum())
        return y * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + float(ctx.read.detach().sum()) - ctx.before), None


def reading(shape):
    def change(results, args):
        read = next(value for value in args if isinstance(value, torch.Tensor) and value.shape == shape)
        return [Reads.apply(value, read) if value.dim() == 2 else value for value in results]

    return change


CODE = {
    "values": (lambda results, args: [value * 1.01 for value in results], "output 0 differs by"),
    "reads a bias": (reading((8,)), "if a loop writes through .data to parameters, buffers and arguments between"),
    "reads an argument": (reading((6, 8)), "if a loop writes through .data to parameters, buffers and arguments"),
}


@pytest.mark.quick("aten-0.0-*", "inductor-0.5-values")
@pytest.mark.parametrize("name", CODE)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("backend", [AtenBackend, InductorBackend], ids=["aten", "inductor"])
def test_faults_of_code_are_seen(backend, dropout, name):
    """Of code that draws other random numbers it is seen in code that draws the model's."""
    change, message = CODE[name]
    if dropout and backend is InductorBackend and "reads" in name:
        pytest.skip("what is written between is compared where the model's random numbers are drawn")

    class Wrong(backend):
        def compile_captured(self, graph_module, example_inputs, hooks):
            run = super().compile_captured(graph_module, example_inputs, hooks)
            return lambda *args: change(run(*args), args)

    with pytest.raises(ModelError, match="emitted code") as error:
        memopt.compile(Model(dropout), backend=Wrong(), verify="full")(X.clone())
    assert message in str(error.value)


class Clock(nn.Module):
    """Leaves something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.cache, self.names = nn.Linear(8, 8), Cache(), []

    def forward(self, x):
        self.cache.count = ticks()
        return self.linear(x)


@torch.compiler.disable
def ticks(times=[]):  # noqa: B006 - outside of what is returned to
    times.append(None)
    return len(times)


def test_what_no_two_calls_of_the_model_do_alike_is_not_compared():
    model = Clock()
    memopt.compile(model, backend="aten", verify="full")(X)
    assert model.cache.count > 1


class Checkpointed(nn.Module):
    """Eager writes to its buffer once more in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x):
        return checkpoint(self.norm, x, use_reentrant=False).tanh()


def test_what_checkpoints_write_again_in_backward_is_no_difference():
    memopt.compile(Checkpointed(), backend="aten", verify="full")(X).sum().backward()
