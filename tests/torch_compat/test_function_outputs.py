"""Gradients of an autograd.Function whose output was written to in place before it was returned."""

import pytest
import torch
from torch import nn

import memopt
from memopt.entry import torch_compile_backend

X = torch.linspace(-1, 1, 8 * 4).reshape(8, 4)
pytestmark = pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")


def accumulated(x):
    found = x.new_zeros(len(x))
    found += x.sum(1)
    return found


def copied(x):
    found = x.new_empty(len(x))
    found.copy_(x.sum(1))
    return found


def in_place(x):
    return x.sum(1).add_(1)


def of_a_part(x):
    found = x.new_zeros(len(x))
    found[2:5] += x.sum(1)[2:5]
    return found


def with_another(x):
    found, other = x.sum(1), x.prod(1)
    found.mul_(2)
    return found, other.mul_(3)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward):
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        return sum(index * x * each[:, None] for index, each in enumerate(gradients, 1)), None


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.given = nn.Linear(4, 4), forward

    def forward(self, x):
        found = Function.apply(self.linear(x), self.given)
        found = found if isinstance(found, tuple) else (found,)
        return sum(index * each for index, each in enumerate(found, 2)).square()


@pytest.mark.parametrize("entry", ["memopt.compile", "torch.compile"])
@pytest.mark.parametrize("forward", [accumulated, copied, in_place, of_a_part, with_another])
def test_what_is_written_to_in_place_and_returned_has_eager_s_gradient(forward, entry):
    model = Model(forward)
    expected = torch.autograd.grad(model(X).sum(), list(model.parameters()))
    run = memopt.compile(model, backend="aten")
    if entry == "torch.compile":
        run = torch.compile(model, backend=torch_compile_backend, options={"backend": "aten"})
    found = torch.autograd.grad(run(X).sum(), list(model.parameters()))
    assert any(each.any() for each in expected)
    torch.testing.assert_close(found, expected)
