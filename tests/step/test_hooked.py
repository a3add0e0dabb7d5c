"""Which gradients are wanted before the end of backward, as hooks come, go, and leave gradients where they are."""

import pytest
import torch
from torch import nn

from memopt.step.hooked import Hooked, added_names, spare


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def hook(parameter):
    return parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))


def test_hooks_that_come_and_go_are_seen(model):
    hooked = Hooked(model)
    assert not hooked.early and not hooked.changed(model)
    handle = hook(model[0].weight)
    assert hooked.changed(model) and hooked.names == hooked.early == hooked.gone == {"0.weight"}
    assert not hooked.changed(model)
    handle.remove()
    assert hooked.changed(model) and not hooked.names


def test_hooks_of_frozen_parameters_are_none(model):
    model[1].requires_grad_(False)
    for parameter in (model[0].bias, model[1].bias.requires_grad_(True)):
        hook(parameter)
    model[1].bias.requires_grad_(False)
    assert Hooked(model).names == {"0.bias"}


def test_hooks_that_leave_gradients_save_nothing(model):
    hook(model[0].weight)
    hooked = Hooked(model)
    hooked.keeps()
    assert hooked.changed(model) and not hooked.names and not hooked.changed(model)


def test_gradients_that_wait_change_what_is_planned_once(model):
    hooked = Hooked(model)
    hooked.waits()
    assert hooked.changed(model) and hooked.waited and not hooked.changed(model)


def test_hooks_are_looked_for_ever_more_rarely(model):
    hooked = Hooked(model)
    assert not any(hooked.changed(model) for _ in range(16))
    hook(model[0].weight)
    seen = [call for call in range(17, 65) if hooked.changed(model)]
    assert seen == [32]


def test_gradients_that_exist_are_added_to(model):
    assert not added_names(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    model[0].bias.grad = torch.zeros(4).to_sparse()
    model[1].requires_grad_(False)
    assert added_names(model) == {"0.weight"}


class Graph(torch.autograd.Function):
    """Takes two tensors, and gives the second one no gradient."""

    @staticmethod
    def forward(ctx, used, unused):
        ctx.unused = unused
        return used * 2

    @staticmethod
    def backward(ctx, gradient):
        spare(ctx.unused)
        return gradient * 2, None


@pytest.mark.parametrize("inner", [False, True])
def test_hooks_of_gradients_are_spared_too(inner):
    seen, leaf = [], nn.Parameter(torch.ones(2))
    unused = leaf * 1 if inner else leaf
    unused.register_hook(lambda gradient: seen.append(gradient.sum().item()))

    Graph.apply(nn.Parameter(torch.ones(2)), unused).sum().backward(retain_graph=True)
    assert not seen
    (Graph.apply(nn.Parameter(torch.ones(2)), unused).sum() + unused.sum()).backward(retain_graph=True)
    unused.sum().backward()
    assert seen == [2.0, 2.0]


def test_a_hook_is_spared_in_one_backward_where_no_gradient_comes():
    called = []
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for parameter in (used, unused):
        parameter.register_post_accumulate_grad_hook(lambda p: called.append(p is used))

    Graph.apply(used, unused).sum().backward()
    assert called == [True]
    unused.sum().backward()
    assert called == [True, False], "the hook is there again"
    Graph.apply(used, unused).sum().backward()
    assert called == [True, False, True], "the gradient that is there came of the backward before"
    (Graph.apply(used, unused) + unused).sum().backward()
    assert called[3:] == [True, False] or called[3:] == [False, True]
