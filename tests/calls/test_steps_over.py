"""Steps over their budget are said once and planned anew, but not beside a profiler, where nothing can be measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import memopt
from tests.training.steps import peak_of


def _net():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(96, 96), nn.GELU()) for _ in range(4)], nn.Linear(96, 96))
    return model, torch.randn(64, 96)


def _step(model, call, x, more):
    """A step whose loss takes more than the first ones' did, in backward."""
    out = call(x)
    extra = sum((out * number).exp().clone().square().mean() for number in range(more))
    (functional.mse_loss(out, x) + 1e-3 * extra).backward()
    model.zero_grad()


def test_a_profiled_step_runs_with_the_code_that_there_is():
    model, x = _net()
    budget = int(0.95 * peak_of(lambda: _step(model, model, x, 6), model, x))
    torch._dynamo.reset()
    run = memopt.compile(model, budget, backend="aten")
    for _ in range(2):
        _step(model, run, x, 0)
    _step(model, run, x, 6)
    assert any("over its budget" in note for note in run.report.notes)
    graphs = run._memopt.sessions.graphs
    with torch.profiler.profile():
        _step(model, run, x, 6)
    assert run._memopt.sessions.graphs == graphs
    _step(model, run, x, 6)
    assert run._memopt.sessions.graphs > graphs
    assert peak_of(lambda: _step(model, run, x, 6), model, x) <= budget


@pytest.mark.whole_process
def test_other_tensors_that_come_beside_a_profiler_are_planned_for_when_it_has_ended():
    model, x = _net()
    budget = int(0.95 * peak_of(lambda: _step(model, model, x, 0), model, x)) + 60_000
    torch._dynamo.reset()
    run = memopt.compile(model, budget, backend="aten")
    _step(model, run, x, 0)
    graphs, kept = run._memopt.sessions.graphs, []
    with torch.profiler.profile():
        kept.append(torch.ones(15_000))
        _step(model, run, x, 0)
    assert run._memopt.sessions.graphs == graphs
    assert any("a profiler is active" in note for note in run.report.notes)
    _step(model, run, x, 0)
    assert run._memopt.sessions.graphs > graphs and run.report.breakdown.others >= 60_000
    for _ in range(2):  # what the loop holds is seen in the first, and planned for in the second
        _step(model, run, x, 0)
    assert peak_of(lambda: _step(model, run, x, 0), model, x, kept) <= budget
