"""The sessions of one model, by kind of call."""

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import memopt
from memopt.calls.guard_fast_path import Kind
from memopt.calls.sessions import NotPlanned


@pytest.fixture
def sessions():
    torch._dynamo.reset()
    return memopt.compile(nn.Linear(4, 4), "1GB", backend="aten")._memopt.sessions


def test_a_kind_of_call_has_one_session_with_its_own_number_of_calls(sessions):
    one, two = sessions.of(Kind(True, False)), sessions.of(Kind(True, False, calls=2))
    assert one is sessions.of(Kind(False, False)) is not two
    assert (one.calls, two.calls, len(sessions)) == (1, 2, 2)
    assert one.early.hooked is sessions.hooked and two.early is None  # several calls wait for the last of them


def test_forgotten_plans_have_new_sessions_and_functions(sessions):
    kind = Kind(True, False)
    session, function = sessions.of(kind), sessions.function(kind)
    assert sessions.function(kind) is function
    sessions.forget(kind.plan)
    assert not sessions and not sessions.compiled
    assert sessions.of(kind) is not session and sessions.function(kind) is not function


def test_a_fraction_stays_one_of_the_same_bytes_until_the_model_moves(sessions):
    reference = sessions.reference
    sessions.forget_all()
    assert sessions.reference is reference
    sessions.forget_model()
    assert sessions.reference is not reference


def test_without_a_plan_the_last_note_says_why(sessions):
    with pytest.raises(NotPlanned, match="call the model once"):
        sessions.report(())
    with pytest.raises(NotPlanned, match="such calls run eagerly"):
        sessions.report(("first", "such calls run eagerly"))


@pytest.mark.parametrize("budget", [None, "38KB"])
def test_a_model_is_let_go_with_what_compile_returned_after_a_refusal_too(budget):
    """Dynamo keeps the backend that it called last when that raised, and what the backend keeps."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    held = weakref.ref(model[0].weight)
    run = memopt.compile(model, budget, backend="aten", verify=False)
    with contextlib.nullcontext() if budget is None else pytest.raises(memopt.BudgetError):
        run(torch.ones(8, 64)).sum().backward()
    del run, model
    torch._dynamo.reset()
    gc.collect()
    assert held() is None


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        return self.last(x).tanh()


def test_a_model_of_several_graphs_is_let_go_after_a_refusal():
    """Dynamo keeps functions that it compiled of earlier graphs in the globals of the model's file."""
    torch._dynamo.reset()
    model = Broken()
    held = weakref.ref(model.first.weight)
    run = memopt.compile(model, 0.1, backend="aten", verify=False)
    with pytest.raises(memopt.BudgetError):
        run(torch.ones(256, 64)).sum().backward()
    del run, model
    for _ in range(2):
        gc.collect()
    assert held() is None


@pytest.mark.parametrize("train", [True, False])
def test_hooks_of_parts_that_come_and_go_between_calls_are_run(train):
    """torch.compile leaves them out of its guards."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(2, 4)
    run = memopt.compile(model, backend="aten", verify=False)
    with torch.set_grad_enabled(train):
        for hook in (None, lambda module, args: (args[0] + 1,), lambda module, args: (args[0] * 3,), None):
            handle = None if hook is None else model[0].register_forward_pre_hook(hook)
            for _ in range(2):
                torch.testing.assert_close(run(x), model(x))
            if handle is not None:
                handle.remove()


def test_a_report_says_the_budget_as_it_is_by_now():
    run = memopt.compile(nn.Linear(4, 4), 1.0, backend="aten")
    run(torch.ones(2, 4)).sum().backward()
    before = run.report.budget_bytes
    run._memopt.sessions.reference.loops(before + 1000)  # a later call of its first step was seen to take more
    assert run.report.budget_bytes == before + 1000


class OnDevice(nn.Module):
    def parameters(self):
        return iter([SimpleNamespace(is_cuda=True)])


@pytest.mark.parametrize("models, budget, captured", [(1, "1GB", True), (2, "1GB", False), (2, None, True)])
def test_models_of_one_budget_are_not_captured(monkeypatch, models, budget, captured):
    made = memopt.compile([nn.Linear(4, 4) for _ in range(models)], budget, backend="aten")
    model, here = OnDevice(), made[0]._memopt.sessions
    monkeypatch.setattr(here, "_model", model)
    monkeypatch.setattr("memopt.calls.sessions.is_sharded", lambda model: False)
    monkeypatch.setattr("memopt.calls.sessions.CudaGraphCapturer", lambda: None)
    assert (here._graph_pool_here() is not None) is captured
