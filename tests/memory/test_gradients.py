"""Gradients that exist are found wherever the model holds parameters at that moment."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.memory.gradients import Gradients


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2, bias=False), nn.GELU()]))


def with_gradient():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    return parameter


def test_a_gradient_of_any_parameter_counts_until_it_is_gone():
    net = model()
    assert not Gradients(net).exist()
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
        assert Gradients(net).exist()
        parameter.grad = None
        assert not Gradients(net).exist()


def test_what_was_replaced_or_added_is_seen():
    net = model()
    assert not Gradients(net).exist()
    net[0].bias = with_gradient()
    assert Gradients(net).exist()
    net[0].bias = None
    assert not Gradients(net).exist()
    net[1].append(nn.Linear(2, 2))
    assert not Gradients(net).exist()
    net[1][-1].weight = with_gradient()
    assert Gradients(net).exist()
    del net[1][-1]
    net[1].register_module("none", None)
    assert not Gradients(net).exist()
    net[1]._parameters = {"written": with_gradient()}
    assert Gradients(net).exist()


def test_shared_modules_and_models_without_parameters():
    part = nn.Linear(2, 2)
    net = nn.Sequential(part, part)
    assert not Gradients(net).exist() and not Gradients(nn.GELU()).exist()
    part.weight.grad = torch.zeros(2, 2)
    assert Gradients(net).exist()


def test_the_guess_goes_by_the_gradient_that_was_found_last():
    net = model()
    gradients = Gradients(net)
    net[1][0].weight.grad = torch.zeros(2, 2)
    assert not gradients.likely()
    assert gradients.exist() and gradients.likely()
    net[1][0].weight.grad = None
    assert not gradients.likely() and not gradients.exist()
    net[1][0].weight.grad = torch.zeros(2, 2)
    assert gradients.likely()
    del net[1][0]
    assert not gradients.likely() and not gradients.exist()


def test_parameters_and_gradients_that_were_found_can_be_swapped():
    net = model()
    gradients = Gradients(net)
    net[0].weight.grad = torch.zeros(2, 2)
    assert gradients.exist()
    torch.utils.swap_tensors(net[0].weight, nn.Parameter(torch.ones(2, 2)))
    assert not gradients.likely() and not gradients.exist()


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_gradients_of_a_part_that_is_torchscripts_are_found():
    net = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    gradients = Gradients(net)
    assert not gradients.exist() and not gradients.likely()
    net(torch.ones(1, 2)).sum().backward()
    assert gradients.exist() and gradients.likely()
