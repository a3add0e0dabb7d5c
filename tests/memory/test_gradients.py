"""Gradients that exist are found wherever the model holds parameters at that moment."""

from __future__ import annotations

import torch
from torch import nn

from memopt.memory.gradients import holds_gradients


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2, bias=False), nn.GELU()]))


def with_gradient():
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    return parameter


def test_a_gradient_of_any_parameter_counts_until_it_is_gone():
    net = model()
    assert not holds_gradients(net)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
        assert holds_gradients(net)
        parameter.grad = None
        assert not holds_gradients(net)


def test_what_was_replaced_or_added_is_seen():
    net = model()
    assert not holds_gradients(net)
    net[0].bias = with_gradient()
    assert holds_gradients(net)
    net[0].bias = None
    assert not holds_gradients(net)
    net[1].append(nn.Linear(2, 2))
    assert not holds_gradients(net)
    net[1][-1].weight = with_gradient()
    assert holds_gradients(net)
    del net[1][-1]
    net[1].register_module("none", None)
    assert not holds_gradients(net)
    net[1]._parameters = {"written": with_gradient()}
    assert holds_gradients(net)


def test_shared_modules_and_models_without_parameters():
    part = nn.Linear(2, 2)
    net = nn.Sequential(part, part)
    assert not holds_gradients(net) and not holds_gradients(nn.GELU())
    part.weight.grad = torch.zeros(2, 2)
    assert holds_gradients(net)
