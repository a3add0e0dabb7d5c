"""Calls with weights of a loop's own in the model's place (`functional_call`), whose optimizer is the model's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap

import memopt
from tests.training.steps import Deep, bytes_of, peak_of

ROWS, TASKS, STEPS = 256, 2, 4


class Meta:
    """First-order MAML: a step on weights of its own for each task, whose gradients there are the model's."""

    def __init__(self, optimizer=torch.optim.AdamW):
        torch.manual_seed(0)
        self.model = Deep()
        self.optimizer = optimizer(self.model.parameters(), 0.01)
        self.call, self.fast, self.number = self.model, {}, 0

    def step(self):
        for _ in range(TASKS):
            self.number += 1
            x = torch.randn(ROWS, 24, generator=torch.Generator().manual_seed(self.number))
            self.fast = {name: value.detach().clone().requires_grad_() for name, value in self.model.named_parameters()}
            for last in (False, True):
                loss = functional_call(self.call, self.fast, (x,))
                moves = torch.autograd.grad(loss, list(self.fast.values()))
                if not last:
                    self.fast = {
                        name: (value - 0.1 * move).detach().requires_grad_()
                        for (name, value), move in zip(self.fast.items(), moves, strict=True)
                    }
            for parameter, move in zip(self.model.parameters(), moves, strict=True):
                parameter.grad = move if parameter.grad is None else parameter.grad + move
            del moves, move
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def peak(self):
        return peak_of(self.step, self.model, self.optimizer, self.fast)

    def state(self):
        state = [value for each in self.optimizer.state.values() for value in each.values()]
        return [*self.model.state_dict().values(), *state]


@pytest.mark.whole_process  # the model's own weights are, for the call, other tensors
def test_it_trains_as_eager_does_within_the_budget():
    reference = Meta()
    expected = [reference.step() for _ in range(STEPS)]
    budget = int(0.8 * reference.peak())
    meta = Meta()
    meta.call = memopt.compile(meta.model, budget, optimizer=meta.optimizer, backend="aten")
    found = [meta.step() for _ in range(STEPS)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert meta.peak() <= budget
    torch.testing.assert_close(meta.state(), reference.state(), rtol=0, atol=0)
    assert meta.call.report.peak_bytes <= budget


def test_state_to_come_is_counted_with_other_weights_in_the_models_place():
    meta = Meta()
    meta.call = memopt.compile(meta.model, "10MB", optimizer=meta.optimizer, backend="aten")
    meta.step()
    assert meta.call.report.breakdown.optimizer_state >= 2 * bytes_of(list(meta.model.parameters()))


def test_calls_with_the_models_own_weights_go_on():
    reference, meta = Meta(torch.optim.SGD), Meta(torch.optim.SGD)
    meta.call = memopt.compile(meta.model, "10MB", optimizer=meta.optimizer, backend="aten")
    for each in (reference, meta):
        for _ in range(2):
            each.step()
            each.call(torch.ones(ROWS, 24)).backward()
            each.optimizer.step()
            each.optimizer.zero_grad()
    torch.testing.assert_close(meta.state(), reference.state(), rtol=0, atol=0)


def test_an_optimizer_of_another_model_is_refused_as_before():
    model, other = Deep(), torch.optim.AdamW(nn.Linear(2, 2).parameters())
    call = memopt.compile(model, "10MB", optimizer=other, backend="aten")
    with pytest.raises(ValueError, match="holds none of the parameters"):
        call(torch.ones(ROWS, 24))


def test_through_transforms_nothing_is_planned_and_the_way_out_is_named():
    """An ensemble by `vmap` of `grad`: of the model itself, beside the compiled one's steps."""
    model = Deep()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call = memopt.compile(model, "10MB", optimizer=optimizer, backend="aten")
    weights, _ = stack_module_state([model, Deep()])
    x = torch.ones(ROWS, 24)

    def gradients(of):
        return vmap(grad(lambda each: functional_call(of, each, (x,))))(weights)

    with pytest.raises(memopt.CaptureError, match="call the original model"):
        gradients(call)
    before = gradients(model)
    call(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name][0])
