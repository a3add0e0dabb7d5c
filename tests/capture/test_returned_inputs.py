"""What a graph returns is in its place, whatever of its inputs it writes to and returns."""

import pytest
import torch
from torch import nn

import memopt


class Counts(nn.Module):
    """Writes to its input apart from autograd, and to a buffer that it returns, itself or as an effect."""

    def __init__(self, returned, hidden=True):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.returned, self.hidden = nn.Linear(3, 3), returned, hidden
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.steps += 1
        self.mean.mul_(0.5)
        y = self.linear(x.clone())
        if self.hidden:
            x.detach().zero_()
        else:
            x = x.mul_(2)
        return self.returned(self, x, y * x, y.sin())


RETURNED = {
    "as an effect": lambda self, x, a, b: (a, b, b, a),
    "as an output": lambda self, x, a, b: (a, self.steps, b, self.mean),
    "the input": lambda self, x, a, b: [x, a, b],
    "with views": lambda self, x, a, b: (b.t(), a, b.detach().t(), self.mean, b),
    "alone": lambda self, x, a, b: self.steps,
}


def results(model, run, x, training):
    x = x.clone().requires_grad_(training)
    given = x * 1.0 if training else x
    out = run(given)
    leaves = list(out) if isinstance(out, (list, tuple)) else [out]
    facts = [(leaf is model.steps, leaf is model.mean, leaf is given, leaf.requires_grad) for leaf in leaves]
    values = [leaf.detach().clone() for leaf in leaves]
    if training and any(leaf.requires_grad for leaf in leaves):
        sum(leaf.square().sum() for leaf in leaves if leaf.requires_grad).backward()
    gradients = [x.grad, *(parameter.grad for parameter in model.parameters())]
    return facts, [*values, given.detach().clone(), *gradients, *model.buffers()]


@pytest.mark.quick("inductor-True-as an effect", "aten-True-*", "aten-False-as an output")
@pytest.mark.parametrize("name", RETURNED)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_outputs_are_in_their_places(backend, training, name):
    torch._dynamo.reset()
    x, found = torch.randn(4, 3), []
    for make in (lambda model: model, lambda model: memopt.compile(model, backend=backend, verify=False)):
        model = Counts(RETURNED[name])
        with torch.set_grad_enabled(training):
            found.append(results(model, make(model), x, training))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1])
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["as an output", "the input"])
def test_a_write_that_autograd_sees_too(name):
    torch._dynamo.reset()
    x, found = torch.randn(4, 3), []
    for make in (lambda model: model, lambda model: memopt.compile(model, backend="aten", verify="full")):
        model = Counts(RETURNED[name], hidden=False)
        model.linear.weight.requires_grad_(False)
        found.append(results(model, make(model), x, True))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[1][1], found[0][1])
    torch._dynamo.reset()
