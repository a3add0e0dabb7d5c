"""Inputs of a class that only says what torch's functions do with it: torch.compile itself fails at them."""

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.plain_inputs import plainly


class Image(torch.Tensor):
    """As torchvision's."""


def test_a_graph_is_given_the_tensors_that_such_inputs_are():
    seen = []
    run = plainly(lambda *args: seen.append(args) or args)
    x, weight = torch.ones(2), nn.Parameter(torch.ones(2))
    for _ in range(2):
        run(x.as_subclass(Image), weight, 3)
    for first, second, third in seen:
        assert type(first) is torch.Tensor and first.data_ptr() == x.data_ptr() and second is weight and third == 3


@pytest.mark.parametrize("trains", [True, False])
def test_such_an_input_trains_and_infers_as_in_eager(trains):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8).as_subclass(Image)
    compiled = memopt.compile(model, "10MB", backend="aten", verify=False)
    found = []
    with torch.set_grad_enabled(trains):
        for run in (model, compiled):
            model.zero_grad()
            output = run(x)
            if trains:
                output.square().sum().backward()
            found.append((output.detach().as_subclass(torch.Tensor), model[0].weight.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
