"""What an engine asks of its next plan is its own: another one's request changes nothing of it."""

import pytest
import torch
from torch import nn

import memopt
from memopt.module import calls_of
from memopt.step.plan_request import PlanRequest


@pytest.fixture
def planned():
    """The session of a step that is planned within a budget, and its captured program."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU(), nn.Softplus())))
    run = memopt.compile(model, 0.8, backend="aten")
    run(torch.randn(512, 16)).sum().backward()
    session = calls_of(run).last
    assert session.recomputes
    return session, session.step.planned[0].source


def test_without_a_search_nothing_is_recomputed(planned):
    session, program = planned
    session.forget_plan()
    session.plan_training([program], by_timeline=False, request=PlanRequest(search=False))
    assert not session.recomputes and not session.feasible


def test_a_correction_is_room_for_the_plan_that_is_asked_for(planned):
    session, program = planned
    peaks = []
    for correction in (0, 10**9, 0):
        session.forget_plan()
        session.plan_training([program], by_timeline=False, request=PlanRequest(correction=correction))
        peaks.append(session.step.plan.peak_bytes)
    assert peaks[0] < peaks[1] and peaks[2] == peaks[0]
