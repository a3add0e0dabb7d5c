"""A dropout that drops nothing returns what it is given, as in the model: writes to it are seen there."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

DROPOUTS = {
    "module": lambda self, y: self.drop(y),
    "function": lambda self, y: F.dropout(y, training=self.training),
    "torch": lambda self, y: torch.dropout(y, 0.5, self.training),
    "by name": lambda self, y: torch.dropout(input=y, p=0.5, train=self.training),
    "probability": lambda self, y: F.dropout(y, 0.0),
    "in place": lambda self, y: F.dropout(y, 0.0, True, True),
    "twice": lambda self, y: self.drop(self.drop(y)),
}


class Model(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.drop, self.dropout = nn.Linear(3, 3), nn.Dropout(0.4), dropout

    def forward(self, x):
        self.dropout(self, x).mul_(2)
        y = self.linear(x).sin()
        z = self.dropout(self, y)
        z += 1
        return y, self.dropout(self, z), y * z


@pytest.mark.quick(
    "module-True", "in place-True", "twice-False", "by name-False", "torch-False", "function-False", "probability-False"
)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("name", DROPOUTS)
def test_what_an_idle_dropout_returns_is_what_it_was_given(name, gradients):
    torch._dynamo.reset()
    model = Model(DROPOUTS[name]).eval()
    call = memopt.compile(copy.deepcopy(model), backend="aten", verify=True)
    for x in (torch.ones(2, 3), torch.arange(6.0).reshape(2, 3)):
        given = x.clone()
        with torch.set_grad_enabled(gradients):
            found, expected = call(given), model(x)
        torch.testing.assert_close((found, given), (expected, x))
        assert found[0].data_ptr() == found[1].data_ptr()
        assert (found[0] is found[1]) == (expected[0] is expected[1])
        if gradients:
            losses = [sum(value.square().sum() for value in out) for out in (found, expected)]
            torch.testing.assert_close(
                torch.autograd.grad(losses[0], [*call.parameters()]),
                torch.autograd.grad(losses[1], [*model.parameters()]),
            )


def test_dropouts_that_drop_stay():
    torch._dynamo.reset()
    model, x = Model(DROPOUTS["module"]), torch.ones(64, 3)
    torch.manual_seed(1)
    expected = model(x.clone())
    torch.manual_seed(1)
    torch.testing.assert_close(memopt.compile(model, backend="aten")(x.clone()), expected)
