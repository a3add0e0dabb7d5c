"""What is told of a call's ends: nothing of one that is run to be compared."""

import pytest
import torch
from torch import nn

import memopt
from memopt.module import calls_of


def test_steps_are_watched_and_noted_unless_they_are_compared():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    run = memopt.compile(model, backend="aten", budget="1GB")
    run(x).sum().backward()
    calls = calls_of(run)
    ends, session = calls.ends, calls.last
    kind = calls.kinds.alone()
    inference = kind._replace(gradients=False)
    assert ends.watch(session, inference, (x,), {}) == (None, None)
    outputs = run(x)
    assert calls.earlier.alive() and ends.watch(session, kind, (x,), {}) == (None, None)  # it is no step of its own
    outputs.sum().backward()
    ends.verifying = True
    assert ends.watch(session, kind, (x,), {}) == (None, None)


def test_a_verified_call_is_run_to_be_compared_only_within():
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(3, 4)
    run, seen = memopt.compile(model, backend="aten", verify="full"), []
    calls = calls_of(run)
    returned = calls.ends.returned

    def noting(*args, **kwargs):
        seen.append(calls.ends.verifying)
        returned(*args, **kwargs)

    calls.ends.returned = noting
    torch.testing.assert_close(run(x), model(x))
    assert seen and all(seen) and not calls.ends.verifying


@pytest.mark.parametrize(("budget", "said"), [("1GB", True), (0.9, False)])
def test_a_limit_that_was_raised_is_noted_of_a_budget_in_bytes(budget, said):
    torch._dynamo.reset()
    model, x = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))), torch.randn(2048, 32)
    run = memopt.compile(model, backend="aten", budget=budget)
    run(x).sum().backward()
    calls = calls_of(run)
    guard, raised = calls.guards[calls.last], [3_000_000, 0, 5_000_000]
    guard.newly_raised = lambda: raised.pop(0)
    for size in ("3.00 MB", "3.00 MB", "5.00 MB"):
        model.zero_grad()
        run(x).sum().backward()
        notes = [note for note in run.report.notes if "more than the budget" in note]
        assert len(notes) == said and all(size in note for note in notes)
