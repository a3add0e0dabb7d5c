"""The optimizers of one model's calls: those before stay where another cannot be, and what was asked for names them."""

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.module import calls_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def made(*, optimizer=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    given = optimizer and optimizer(model.parameters())
    return model, given, calls_of(memopt.compile(model, "1GB", optimizer=given, backend="aten"))


def test_what_was_asked_for_has_the_optimizer_that_was_set_last():
    model, _, calls = made()
    assert not calls.optimizers and calls.optimizers.asked_for().optimizer is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls.optimizers.replace(optimizer)
    assert calls.optimizers and calls.optimizers.asked_for().optimizer == (optimizer,)
    assert calls.optimizers.asked_for().budget == calls.options.budget and calls.options.optimizer is None
    calls.optimizers.replace(None)
    assert not calls.optimizers and calls.optimizers.asked_for().optimizer is None


def test_one_of_other_parameters_is_refused_and_the_one_before_stays():
    _, before, calls = made(optimizer=torch.optim.AdamW)
    with pytest.raises(ValueError, match="holds none of the parameters"):
        calls.optimizers.replace(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    assert calls.optimizers.asked_for().optimizer == (before,)
    with pytest.raises(TypeError, match="optimizer takes one optimizer"):
        calls.optimizers.replace("adamw")
    assert calls.optimizers.asked_for().optimizer == (before,)


def test_it_holds_none_that_its_loop_lets_go_of():
    model, optimizer, calls = made(optimizer=torch.optim.AdamW)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()
    del optimizer
    gc.collect()
    assert not calls.optimizers and calls.optimizers.asked_for().optimizer is None


def test_a_step_is_counted_once_it_was_seen_and_only_then():
    model, _, calls = made()
    counted = []
    calls.residents.recount = lambda: counted.append(calls.sessions.optimizers.footprint())
    calls.optimizers.recount_if_due()
    assert not counted
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    calls.optimizers.recount_if_due()
    assert [each.state_bytes > 2 * sum(p.nbytes for p in model.parameters()) for each in counted] == [True]
    calls.optimizers.recount_if_due()
    assert len(counted) == 1
