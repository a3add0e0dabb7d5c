"""Autocast and GradScaler around and inside a model that keeps a budget."""

from __future__ import annotations

import contextlib

import pytest
import torch

import memopt
from tests.training.steps import assert_equal, budget_for, gradients, make, peak_of


def bf16():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def step(run, x, seed=1):
    torch.manual_seed(seed)
    with bf16():
        loss = run(x)
    loss.backward()
    return loss.detach()


@pytest.mark.quick("0.4")
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_autocast_around_the_call(share):
    model, x = make(dropout=0.2)
    expected = step(model, x), gradients(model)
    model.zero_grad()
    budget = budget_for(model, (x,), share, context=bf16)
    run = memopt.compile(model, budget, backend="aten")
    assert_equal((step(run, x), gradients(model)), expected)
    model.zero_grad()
    measured = peak_of(lambda: step(run, x), model, x)
    assert measured <= budget
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)


class Inside(torch.nn.Module):
    """Enters autocast by itself, and leaves it for the loss."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.body.layers[0](x).relu()
            y = self.body.layers[1](y)
        return self.body(y.float()).square()


def test_autocast_inside_the_model():
    body, x = make(layers=4)
    model = Inside(body)
    budget = budget_for(model, (x,), 0.2)
    model(x).backward()
    expected = gradients(model)
    model.zero_grad()
    run = memopt.compile(model, budget, backend="aten")
    run(x).backward()
    assert_equal(gradients(model), expected)
    model.zero_grad()
    assert peak_of(lambda: run(x).backward(), model, x) <= budget


def test_autocast_on_and_off_are_planned_apart():
    model, x = make()
    run = memopt.compile(model, budget_for(model, (x,), 1.0), backend="aten")
    for context in (bf16, contextlib.nullcontext, bf16):
        found = []
        for each in (model, run):
            model.zero_grad()
            with context():
                loss = each(x)
            loss.backward()
            found.append((loss.detach(), gradients(model)))
        assert_equal(found[1], found[0])


@pytest.mark.long
def test_attention_with_dropout_and_tied_weights_equals_aot_autograd_s():
    """AOTAutograd rounds to half precision in other places than eager does: memopt must add nothing to that."""
    torch.manual_seed(0)
    model = memopt.models.build("gpt2", tiny=True, layers=1)
    inputs = model.example_inputs(2, labels=True)

    def run_step(run):
        torch.manual_seed(1)
        with bf16():
            loss = run(**inputs)
        loss.backward()
        return loss.detach()

    expected = run_step(torch.compile(model, backend="aot_eager")), gradients(model)
    model.zero_grad()
    budget = budget_for(model, inputs, 0.2, context=bf16)
    run = memopt.compile(model, budget, backend="aten")
    assert_equal((run_step(run), gradients(model)), expected)
    model.zero_grad()
    assert peak_of(lambda: run_step(run), model, inputs) <= budget


# -- GradScaler -------------------------------------------------------------------------------------------------------


def train(run, model, x, optimizer, scaler, *, overflow=()):
    """Steps of a scaled loss; at the steps in `overflow` the gradients become infinite and the update is skipped."""
    losses, scales = [], []
    for number in range(4):
        optimizer.zero_grad()
        with bf16():
            loss = run(x)
        scaled = scaler.scale(loss * (torch.inf if number in overflow else 1.0))
        scaled.backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.quick("overflow1")
@pytest.mark.parametrize("overflow", [(), (1,)])
def test_a_gradient_scaler_scales_clips_and_skips(overflow):
    def whole(budget=None):
        model, x = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)
        run = model if budget is None else memopt.compile(model, budget, optimizer=optimizer, backend="aten")
        result = train(run, model, x, optimizer, scaler, overflow=overflow), gradients(model)
        result += ([p.detach().clone() for p in model.parameters()],)
        if budget is not None:
            optimizer.zero_grad()
            assert peak_of(lambda: train(run, model, x, optimizer, scaler), model, x, optimizer) <= budget
        return result

    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected, found = whole(), whole(budget_for(model, (x,), 0.2, optimizer=optimizer, context=bf16))
    assert_equal(found, expected)
    scales = found[0][1]
    assert (scales[1] < scales[0]) == bool(overflow)
