from __future__ import annotations

import torch
from torch import nn

from memopt.memory.hand_over import hooked_names, is_hooked


def test_a_parameter_is_hooked_as_long_as_a_hook_waits_for_its_gradient() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: gradient)  # runs before the gradient is accumulated
    assert not is_hooked(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert is_hooked(parameter)
    handle.remove()
    assert not is_hooked(parameter)


def test_names_of_hooked_parameters_are_the_first_and_of_those_that_are_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    model[1].bias.requires_grad_(False)
    assert hooked_names(model) == {"0.weight", "0.bias"}
    assert hooked_names(nn.Linear(2, 2)) == frozenset()
