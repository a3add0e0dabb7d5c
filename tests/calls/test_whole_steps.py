"""What a step takes behind the model's graphs, or beyond what is counted for them, is seen, said and planned with."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.live_tensors import live_blocks
from tests.training.steps import peak_of


def _net():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(4)], nn.Linear(96, 1))
    return model, torch.randn(64, 96)


def _penalised(model, call, x):
    """A step whose penalty is computed before the call: its backward runs once all gradients of the model are there."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    (call(x).mean() + 0.01 * penalty).backward()


def _run(share, step, *, steps=5, accumulate=False):
    """A stand-in after so many steps within a share of eager's peak; that share, and what one more step takes."""
    torch._dynamo.reset()
    gc.collect()
    model, x = _net()
    eager = 0
    for _ in range(2):
        if not accumulate:
            model.zero_grad()
        eager = peak_of(lambda: step(model, model, x), model, x)
    model.zero_grad()
    run = memopt.compile(model, int(share * eager), backend="aten")
    for _ in range(steps):
        if not accumulate:
            model.zero_grad()
        step(model, run, x)
    if not accumulate:
        model.zero_grad()
    return run, int(share * eager), peak_of(lambda: step(model, run, x), model, x)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_penalty_before_the_call_is_counted_or_refused(accumulate, caplog):
    with pytest.raises(memopt.BudgetError, match="once backward has left the model") as refused:
        _run(0.93, _penalised, accumulate=accumulate)
    assert caplog.text.count("a step was over its budget") == 1
    model, x = _net()
    for _ in range(2):  # the least that is named is what such steps take behind the model's own gradients
        if not accumulate:
            model.zero_grad()
        eager = peak_of(lambda: _penalised(model, model, x), model, x)
    share = refused.value.minimum_bytes / eager
    assert 0.93 < share <= 1
    run, budget, took = _run(share + 0.001, _penalised, accumulate=accumulate)
    assert took <= budget
    assert run.report.peak_bytes <= budget


def test_gradients_that_wait_for_the_models_are_inside_the_budget_from_the_first_step_on(caplog):
    def step(model, call, x):
        loss = call(x).mean()
        (loss + 0.01 * sum(parameter.square().sum() for parameter in model.parameters())).backward()

    run, budget, took = _run(1.0, step)
    assert took <= budget
    assert not run.report.notes and "over its budget" not in caplog.text


def test_what_is_counted_whole_is_left_alone():
    run, budget, took = _run(0.9, lambda model, call, x: call(x).mean().backward())
    assert took <= budget and not run.report.notes
    steps = run._memopt.sessions.whole_steps
    assert not steps.seen and len(steps._keys) == 1


def test_a_call_that_fails_leaves_nothing_open():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 32)
            self.fails = False

        def forward(self, x):
            if self.fails:
                raise ValueError("as it is told")
            return self.layer(x).relu().sum()

    model, x = Sometimes(), torch.randn(16, 32)
    run = memopt.compile(model, "1MB", backend="aten")
    for _ in range(2):
        run(x).backward()
    run.fails = True
    with pytest.raises(ValueError, match="as it is told"):
        run(x)
    assert memopt.measure(lambda: torch.empty(256), device="cpu").peak_bytes == 1024
    run.fails = False
    run(x).backward()


@pytest.mark.parametrize("given", [True, False])
def test_evaluation_leaves_nothing_of_trained_weights_beside_the_steps(given):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    optimizer, x, device = torch.optim.SGD(model.parameters(), 0.1), torch.randn(32, 64), torch.device("cpu")
    run = memopt.compile(model, "1MB", optimizer=optimizer if given else None, backend="aten")

    def called():
        with torch.autocast("cpu", torch.bfloat16):
            return run(x).square().mean()

    called().backward()
    optimizer.step()
    before = live_blocks(device)
    with torch.no_grad():
        called()
    gc.collect()
    left = sum(block.nbytes for key, block in live_blocks(device).items() if key not in before)
    assert left < 2 * 64 * 64  # not even one of the weights in bfloat16
