"""The calls of one model: each kind has its session, and what is forgotten is planned anew."""

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.guard_fast_path import Kind

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def made():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    return model, x, memopt.compile(model, "1GB", backend="aten")


def test_training_and_inference_share_a_session_and_added_gradients_have_one_of_their_own():
    _, x, run = made()
    calls = run._memopt
    with torch.no_grad():
        run(x)
    run(x).sum().backward()
    assert len(calls.sessions) == 1
    run(x).sum().backward()
    assert len(calls.sessions) == 2 and calls.last is calls.sessions[Kind(True, True).plan]


def test_a_model_that_is_cast_is_planned_anew_and_its_report_stays_until_then():
    model, x, run = made()
    run(x).sum().backward()
    calls, report = run._memopt, run.report
    run.double()
    assert not calls.sessions and calls.last is None and run.report == report
    assert torch.equal(run(x.double()), model(x.double()))
    assert len(calls.sessions) == 1


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_what_is_planned_outlives_an_error_of_the_model(budget):
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    run = memopt.compile(model, budget, backend="aten")
    run(torch.randn(2, 4))
    planned = dict(run._memopt.sessions)
    for bad in (torch.randn(3, 5), "text"):
        with pytest.raises((RuntimeError, TypeError)):
            run(bad)
        assert dict(run._memopt.sessions) == planned


class Held:
    """A function that holds an arena between its calls."""

    def __init__(self):
        self.released = 0

    def release(self):
        self.released += 1


@pytest.mark.parametrize("budget", ["1GB", None])
def test_what_an_evaluation_holds_between_its_calls_is_given_back_before_a_step(budget):
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = memopt.compile(model, budget, optimizer=torch.optim.SGD(model.parameters(), 0.1), backend="aten")

    def evaluates():
        with torch.no_grad():
            run(x)

    def trains():
        run(x).sum().backward()

    trains()
    trains()  # its gradients are added
    evaluates()
    held = Held()
    for session in run._memopt.sessions.values():
        session.functions.add(held)
    expected = 0
    for call, switches in ((evaluates, 0), (trains, 1), (trains, 0), (evaluates, 1), (evaluates, 0), (trains, 1)):
        call()
        expected += switches * (budget is not None) * len(run._memopt.sessions)
        assert held.released == expected
