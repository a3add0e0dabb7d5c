"""Gradients of zeros where a write has taken the place of what a tensor was: eager has them, and so has a step."""

import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.reached import reached_inputs
from tests.inductor.test_peak_lower_bound import needs_compiler


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


WRITES = (
    lambda y: y.zero_(),
    lambda y: y.reshape(-1).zero_(),
    lambda y: y.t().fill_(0.3),
    lambda y: y.copy_(torch.ones(6, 4)),
    lambda y: y.__setitem__(..., 0.7),
    lambda y: y.mul_(0),
    lambda y: y.select(0, 1).mul_(0.5),
)


class Written(nn.Module):
    """Per write a layer, whose result it is written to."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in WRITES)
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        found = []
        for layer, write in zip(self.layers, WRITES, strict=True):
            y = torch.tanh(layer(x)) * 1
            write(y)
            found.append(y * 1.5)
        return [*found, self.unused(x)]


@pytest.mark.quick("aten")
@pytest.mark.parametrize("engine", ["aten", pytest.param("inductor", marks=needs_compiler)])
def test_what_is_overwritten_has_gradients_of_zeros(engine):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Written()
    model = copy.deepcopy(plain)
    run = memopt.compile(model, backend=engine)
    for used in (range(len(WRITES)), (1, 3), (0,), (6,)):
        x = torch.randn(6, 4)
        for call, weights in ((plain, plain), (run, model)):
            weights.zero_grad()
            outputs = call(x)
            sum(outputs[index].square().sum() for index in used).backward()
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(other.grad, one.grad)


def _reached(function, *inputs):
    seen = []

    def note(graph_module, _):
        names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
        seen.append({names[place]: sources for place, sources in reached_inputs(graph_module).items()})
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=note)(*inputs)
    return seen[0]


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
def test_paths_of_eager_are_followed_to_inputs_of_every_kind():
    leaf, other, buffer = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True), torch.zeros(4)

    def step(leaf, inner, other, buffer):
        buffer.add_(leaf)
        head = inner * 1
        head.zero_()
        return head, other.detach() + leaf, Double.apply(other)

    found = _reached(step, leaf, torch.randn(4, requires_grad=True) * 2, other, buffer)
    # What the buffer holds is handed back as an input that is written to; a user's own backward is not looked into.
    written = {shown for shown in found["l_leaf_"] if shown[0] == "input"}
    assert found["l_leaf_"] - written == {("output", 1)}
    assert len(written) == 1
    assert {shown for shown in found["l_inner_"] if shown[0] == "output"} == {("output", 0)}
    assert "l_other_" not in found
