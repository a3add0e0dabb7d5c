"""A copy of an optimizer on fake tensors: stepped apart from the real one."""

import contextlib
import functools

import pytest
import torch
from torch import nn

from memopt.memory.optimizer_copy import CannotCount, Twins


def copied(optimizer, *trained):
    twins = Twins({id(parameter): parameter for parameter in trained}, None)
    with twins.mode:
        return twins.copy(optimizer, contextlib.nullcontext), twins


def test_its_step_leaves_the_real_one_as_it_was():
    weight, idle = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(3, 2)
    optimizer = torch.optim.Adam([weight, idle], lr=0.1)
    optimizer.step()
    before = weight.clone()
    copy, twins = copied(optimizer, weight)
    with twins.mode:
        copy.step()
    twin = twins(weight)
    assert torch.equal(weight, before) and optimizer.state[weight]["step"] == 1
    assert set(copy.state) == {twin} and copy.state[twin]["exp_avg"].shape == weight.shape
    assert copy.state[twin]["step"] == 2, "what is a number stays known"
    assert twins.made(copy) and not twins.made(optimizer)
    assert twins.has_gradient(weight) and not twins.has_gradient(idle) and twins(idle).grad is None


def test_what_is_shared_stays_shared_and_hooks_are_left():
    weight = nn.Parameter(torch.ones(2))
    optimizer, ran = torch.optim.SGD([weight], lr=0.1), []
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    optimizer.first = optimizer.second = {"rates": [0.5], "made": functools.partial(max, 1)}
    copy, twins = copied(optimizer, weight)
    with twins.mode:
        copy.step()
    assert copy.first is copy.second is not optimizer.first and copy.first["rates"] == [0.5] and not ran
    assert copy.first["made"](3) == 3


def test_an_optimizer_that_a_function_closes_over_cannot_be_counted():
    weight = nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([weight], lr=0.1)
    outer = torch.optim.SGD([weight], lr=0.1)
    outer.also = lambda: inner.step()
    with pytest.raises(CannotCount, match="what a function closes over"):
        copied(outer, weight)
