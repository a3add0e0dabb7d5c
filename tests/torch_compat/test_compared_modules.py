"""A method that is compiled for one layer after another does for each what it says."""

import pytest
import torch
from torch import nn

import memopt


class Model(nn.Module):
    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.beside = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), nn.Linear(3, 3)
        self.how = how

    @torch.compiler.disable
    def aside(self, x):
        return self.beside(x) * 2

    def block(self, layer, x):
        if self.how == "is":
            chosen = layer is self.body[2]
        elif self.how == "equal":
            chosen = layer == self.body[2]
        else:
            chosen = layer in list(self.body)[2:]
        return layer(self.aside(x) if chosen else x)

    def forward(self, x):
        for layer in self.body:
            x = self.block(layer, x)
        return x


@pytest.mark.parametrize("how", ["is", "equal", "in"])
def test_what_is_done_for_one_layer_is_not_done_for_others(how):
    model, x = Model(how), torch.ones(2, 3)
    call = memopt.compile(model, backend="aten")
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
