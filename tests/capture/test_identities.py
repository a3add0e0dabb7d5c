"""Outputs are one object for the caller where they are in the model, and only there."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

RETURNED = {
    "twice": lambda x, y: (y, y),
    "cast to what it is": lambda x, y: (y, y.to(y.dtype), y.detach()),
    "flattened": lambda x, y: (y[0].flatten(), y[0], y[::2]),
    "one view": lambda x, y: [view := y[0].unsqueeze(0), view.to(y.dtype), y.detach()][:3],
    "in place": lambda x, y: {"a": y, "b": y.relu_(), "c": y.detach()},
    "equal views of an input": lambda x, y: (x.split(2)[1], x.chunk(2)[1], x.split(2)[1].detach()),
    "equal views": lambda x, y: (y.split(2)[1], y.chunk(2)[1]),
    "a view of the same shape": lambda x, y: (y, y.view_as(y)),
    "with another in between": lambda x, y: (y.sin(), y.contiguous(), x * 2, y),
}


class Model(nn.Module):
    def __init__(self, returned):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.returned = nn.Linear(3, 3), returned

    def forward(self, x):
        return self.returned(x, F.silu(self.linear(x)))


def pairs(out):
    values = list(out.values()) if isinstance(out, dict) else list(out)
    same = [(a, b) for (a, x), (b, y) in itertools.combinations(enumerate(values), 2) if x is y and x.requires_grad]
    return (
        same,
        [value.requires_grad for value in values],
        [value.data_ptr() == values[0].data_ptr() for value in values],
    )


@pytest.mark.quick("*-True")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", RETURNED)
def test_outputs_are_one_object_where_they_are_in_the_model(name, training):
    torch._dynamo.reset()
    model, x = Model(RETURNED[name]), torch.randn(4, 3, requires_grad=training)
    call = memopt.compile(model, backend="aten", verify=True)
    with torch.set_grad_enabled(training):
        for _ in range(2):
            found, expected = call(x), model(x)
            torch.testing.assert_close(found, expected)
            assert pairs(found) == pairs(expected)
            if training:
                first = [next(iter(out.values())) if isinstance(out, dict) else out[1] for out in (found, expected)]
                torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), x) for one in first))
