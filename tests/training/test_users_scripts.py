"""Scripts as users write them, within a budget beside eager: numbers, which gradients are None, the random stream."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

WIDTH, ROWS = 16, 256


class Net(nn.Module):
    """A body with dropout whose activations outweigh its weights, batch norms, a head, and a head that nothing uses."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(6))
        self.head, self.unused, self.drop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Dropout(0.1)

    def features(self, x):
        for layer, norm in zip(self.body, self.norms, strict=True):
            x = x + torch.tanh(F.gelu(norm(layer(self.drop(x)))))
        return x

    def forward(self, x):
        return self.head(self.features(x))


class Reversed(torch.autograd.Function):
    """The same values; gradients reversed and scaled."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Domains(Net):
    """A second head behind reversed gradients, by a scale that its loop schedules."""

    scale = 0.0

    def forward(self, x):
        found = self.features(x)
        return self.head(found) + self.unused(Reversed.apply(found, self.scale)).sum(-1, keepdim=True)


class Script:
    """One run of a script: its model, the stand-in or the model itself, and what each step has come to."""

    def __init__(self, wrap, kind=Net):
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.model = kind()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, weight_decay=0.1)
        self.call, self.seen = wrap(self.model, self.optimizer), []

    def data(self, number, rows=ROWS):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(rows, WIDTH, generator=generator)
        return x, torch.randint(0, WIDTH, (rows,), generator=generator)

    def steps(self, change=lambda number: None, count=5, **backward):
        for number in range(count):
            change(number)
            x, y = self.data(number)
            self.step(F.cross_entropy(self.call(x), y), **backward)
        return self

    def step(self, loss, *others, set_to_none=True, **backward):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        loss.backward(**backward)
        gradients = [None if each.grad is None else each.grad.clone() for each in self.call.parameters()]
        buffers = [each.clone() for each in self.call.buffers()]
        self.seen.append([loss.detach(), *others, *gradients, *buffers, torch.get_rng_state()])
        self.optimizer.step()


def mixed_batches(wrap):
    script = Script(wrap)
    for number in range(4):
        x, y = script.data(number)
        share, order = torch.rand(()).item(), torch.randperm(ROWS)
        out = script.call(share * x + (1 - share) * x[order])
        script.step(share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order]))
    return script


def adversarial_inputs(wrap):
    script = Script(wrap)
    for number in range(4):
        x, y = script.data(number)
        F.cross_entropy(script.call(x.requires_grad_()), y).backward()
        worse = (x + 0.1 * x.grad.sign()).detach()
        script.step(F.cross_entropy(script.call(worse), y), x.grad)
    return script


def pseudo_labels(wrap):
    script = Script(wrap)
    for number in range(4):
        x, y = script.data(number)
        with torch.no_grad():
            guessed = script.call(x).argmax(-1)
        script.step(F.cross_entropy(script.call(x + 0.1), guessed) + F.cross_entropy(script.call(x), y))
    return script


def gradients_reversed_by_a_schedule(wrap):
    script = Script(wrap, Domains)
    return script.steps(lambda number: setattr(script.call, "scale", 0.3 * number))


def norms_frozen_for_a_while(wrap):
    script = Script(wrap)

    def change(number):
        script.call.train()
        if number in (2, 3):
            script.call.norms.eval()

    return script.steps(change)


def hooks_of_parts_that_come_and_go(wrap):
    script, hooks = Script(wrap), []

    def change(number):
        if number == 2:
            hooks.append(script.call.body[2].register_forward_hook(lambda module, args, found: found * 1.5))
            hooks.append(script.model.body[1].weight.register_hook(lambda gradient: gradient * 2))
        if number == 4:
            for hook in hooks:
                hook.remove()

    return script.steps(change, 6)


def backward_to_some_of_the_weights(wrap):
    script = Script(wrap)
    return script.steps(inputs=[script.model.head.weight, script.model.body[2].weight])


def gradients_that_are_zeroed_in_place(wrap):
    return Script(wrap).steps(set_to_none=False)


def outputs_written_to_before_the_loss(wrap):
    script = Script(wrap)
    for number in range(4):
        x, y = script.data(number)
        out = script.call(x)
        out.mul_(2)
        out[:, 0] = 0
        script.step(F.cross_entropy(out, y))
    return script


def a_copy_goes_on(wrap, turn=copy.deepcopy):
    script = Script(wrap).steps(count=2)
    script.call = turn(script.call)
    script.optimizer = torch.optim.AdamW(script.call.parameters(), 1e-2)
    return script.steps(count=3)


def a_pickled_one_goes_on(wrap):
    return a_copy_goes_on(wrap, lambda call: pickle.loads(pickle.dumps(call)))


SCRIPTS = [
    mixed_batches,
    adversarial_inputs,
    pseudo_labels,
    gradients_reversed_by_a_schedule,
    norms_frozen_for_a_while,
    hooks_of_parts_that_come_and_go,
    backward_to_some_of_the_weights,
    gradients_that_are_zeroed_in_place,
    outputs_written_to_before_the_loss,
    a_copy_goes_on,
    a_pickled_one_goes_on,
]


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instantiated")
@pytest.mark.quick("hooks_of_parts_that_come_and_go")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_goes_as_in_eager(script):
    expected = script(lambda model, optimizer: model).seen
    found = script(lambda model, optimizer: memopt.compile(model, 0.85, optimizer=optimizer, backend="aten")).seen
    assert len(found) == len(expected)
    for number, (own, eager) in enumerate(zip(found, expected, strict=True)):
        assert [each is None for each in own] == [each is None for each in eager], number
        values = [[each for each in step if each is not None] for step in (own, eager)]
        torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
