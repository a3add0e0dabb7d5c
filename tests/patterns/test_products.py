"""Products of one matrix with several weights: which are found, and which weights lie side by side."""

import pytest
import torch
from torch import nn

from memopt.patterns.products import adjacent, products_of_one
from tests.support import capture


class Heads(nn.Module):
    def __init__(self, *outputs, bias=True, tied=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, size, bias=bias) for size in outputs)
        if tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x):
        return [layer(x) for layer in self.layers]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)])
def test_layers_that_read_one_value_are_one_group(bias, shape):
    (group,) = products_of_one(capture(Heads(8, 16, 8, bias=bias).eval(), torch.randn(shape)))
    assert [product.weight.meta["val"].shape[0] for product in group] == [8, 16, 8]
    assert all((product.bias is None) == (not bias) for product in group)


def test_other_values_tied_weights_and_odd_sizes_are_no_group():
    class Apart(Heads):
        def forward(self, x):
            return [layer(x * index) for index, layer in enumerate(self.layers)]

    x = torch.randn(5, 8)
    assert not products_of_one(capture(Apart(8, 8).eval(), x))
    assert not products_of_one(capture(Heads(8, 8, tied=True).eval(), x))
    assert not products_of_one(capture(Heads(8, 7).eval().half(), torch.randn(5, 8).half()[:, :8]))[1:]
    odd = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = odd

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    assert not products_of_one(capture(Odd().eval(), torch.randn(5, 3)))


def test_one_kind_of_weights_of_a_mixed_set_is_a_group():
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)])

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    (group,) = products_of_one(capture(Mixed().eval(), torch.randn(5, 8)))
    assert len(group) == 2 and all(product.bias is not None for product in group)


def test_tensors_side_by_side():
    whole = torch.randn(12, 4)
    assert adjacent([whole[:3], whole[3:5], whole[5:]])
    assert not adjacent([whole[:3], whole[4:]]) and not adjacent([whole[3:5], whole[:3]])
    assert not adjacent([whole[:3], whole[3:].clone()])
