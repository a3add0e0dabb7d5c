"""A step of several graphs under one budget: judged by the code of all of them, before the first one runs."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.inductor.forward_backward import ForwardBackward
from memopt.inductor.replay import ReplayError
from memopt.step.multi_graph import planned_whole
from tests.backends.conftest import _compiler
from tests.end_to_end import gradients, resident_bytes, restorer, step

__all__ = ["_compiler"]
pytestmark = pytest.mark.usefixtures("_compiler")


class Broken(nn.Module):
    """Two graphs with as much to keep each, and a buffer that moves in the first."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.first, self.second = (nn.Sequential(*(self.block() for _ in range(2))) for _ in range(2))

    @staticmethod
    def block():
        return nn.Sequential(nn.Linear(32, 32), nn.GELU())

    def forward(self, x):
        x = self.first(self.norm(x))
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.fixture
def made():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, inputs = Broken(), {"x": torch.randn(256, 32)}
    restore = restorer(model)
    loss, expected = step(model, inputs), gradients(model)
    restore()
    plain = memopt.plan(model, inputs)
    return model, inputs, (loss, expected), (plain.minimum_bytes, plain.unconstrained_bytes), restore


def kept(made, budget):
    """The report of a step within the budget, measured, with eager's numbers."""
    model, inputs, expected, _, restore = made
    compiled = memopt.compile(model, budget, backend="inductor")
    torch.testing.assert_close((step(compiled, inputs), gradients(model)), expected, rtol=1e-4, atol=1e-5)
    restore()
    taken = memopt.measure(step, compiled, inputs, device="cpu").peak_bytes + resident_bytes(model, inputs)
    assert taken <= budget + 4, "and the scalar in which this test's own backward begins"
    assert compiled.report.peak_bytes <= budget and len(compiled.report.programs) == 2
    restore()
    return compiled.report


@pytest.mark.long
def test_where_no_code_does_all_graphs_run_operator_by_operator_together(made, monkeypatch):
    peaks = ForwardBackward.peaks

    def more(self, program, workspace):  # as if Inductor stored what was to be fused
        found = peaks(self, program, workspace)
        return dataclasses.replace(found, backward=2 * found.backward)

    monkeypatch.setattr(ForwardBackward, "peaks", more)
    least, _ = made[3]
    report = kept(made, int(least * 1.02))
    assert any("keep the budget together" in note for note in report.notes)


def test_code_that_cannot_be_judged_is_not_run_under_a_budget(made, monkeypatch):
    def unknown(*args):
        raise ReplayError("made up")

    monkeypatch.setattr(ForwardBackward, "peaks", unknown)
    least, most = made[3]
    report = kept(made, (least + most) // 2)
    assert any("made up" in note for note in report.notes)
    assert any("keep the budget together" in note for note in report.notes)


@pytest.mark.long
def test_a_refused_step_has_run_nothing_and_names_what_keeps_the_budget(made):
    model, inputs, *_ = made
    with pytest.raises(memopt.BudgetError) as refused:
        step(memopt.compile(model, 1, backend="inductor"), inputs)
    assert model.norm.num_batches_tracked == 0 and all(p.grad is None for p in model.parameters())
    assert refused.value.minimum_bytes <= made[3][0], "code takes no more than its operators"
    report = kept(made, int(refused.value.minimum_bytes * 1.02))
    assert not report.notes


@pytest.mark.long
def test_autocast_s_casts_are_planned_once(made):
    model, inputs, *_ = made
    compiled = memopt.compile(model, made[3][1], backend="inductor")
    with torch.autocast("cpu", torch.bfloat16):
        loss = compiled(**inputs)
    loss.backward()
    assert all(p.grad is not None for p in model.parameters()) and len(compiled.report.programs) == 2


def test_the_best_plan_of_all_is_planned_again_with_its_own_correction():
    """What the graphs' code corrects for itself, while it is made, is none of the step's."""
    asked, judged = [], iter([(-80, 80), (50, -200), (0, 60), (0, 10)])

    def plan_training(programs, *, by_timeline, request):
        assert not by_timeline
        asked.append(request.correction)

    session = SimpleNamespace(
        engine=lambda: SimpleNamespace(rehearses=True), budget=object(), plan_training=plan_training,
        forget_code=lambda: None, collection=SimpleNamespace(rehearsal=contextlib.nullcontext), coded=lambda: True,
        judged=lambda: next(judged), feasible=True, recomputes=True, gain=lambda size: 0.05, limit_bytes=1000,
    )  # fmt: skip
    with planned_whole(session, lambda: [SimpleNamespace(training=True)]):
        assert asked == [0, -90, 50, -20, -90]
