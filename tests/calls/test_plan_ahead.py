"""Planning without running the model."""

import logging

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.plan_ahead import PlanningFailed


def failing(monkeypatch, budget):
    def fail(*args):
        raise ZeroDivisionError("within")

    run = memopt.compile(nn.Linear(4, 4), budget, backend="aten")
    monkeypatch.setattr("memopt.calls.plan_ahead.programs_of", fail)
    monkeypatch.setattr("memopt.calls.failures._is_inside", lambda file: True)
    return run


def test_nothing_runs_and_the_report_is_there():
    model = nn.BatchNorm1d(4)
    run = memopt.compile(model, "1GB", backend="aten")
    report = run._memopt.plan((torch.randn(3, 4),), {})
    assert report == run.report and model.num_batches_tracked == 0


def test_a_failure_of_planning_is_a_warning_without_a_budget(monkeypatch, caplog):
    run = failing(monkeypatch, None)
    with caplog.at_level(logging.WARNING, "memopt"):
        run._memopt.plan_ahead((torch.randn(3, 4),), {})
    assert "Linear cannot be planned: memopt failed (ZeroDivisionError: within)" in caplog.text
    assert not run._memopt.sessions


def test_a_failure_of_planning_is_raised_with_a_budget(monkeypatch):
    run = failing(monkeypatch, "1GB")
    with pytest.raises(PlanningFailed, match="memopt failed"):
        run._memopt.plan_ahead((torch.randn(3, 4),), {})


class Halves(nn.Module):
    """Nothing of it can be recomputed for less memory."""

    def __init__(self, breaks):
        super().__init__()
        self.first, self.last, self.breaks = nn.Linear(8, 8), nn.Linear(8, 64), breaks

    def forward(self, x):
        x = self.first(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


@pytest.mark.parametrize("breaks", [False, True])
def test_less_of_a_loss_is_allowed_for_before_a_plan_is_refused(breaks):
    def planned(budget):
        torch._dynamo.reset()
        return memopt.plan(Halves(breaks), torch.ones(16, 8), budget, backend="aten")

    usual = planned(1.0)  # of eager's own peak, with the loss that is usual
    assert planned("1MB").peak_bytes > usual.budget_bytes  # with all that is allowed for
    assert planned(usual.budget_bytes).peak_bytes <= usual.budget_bytes
