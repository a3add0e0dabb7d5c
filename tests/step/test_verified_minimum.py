"""The least that a refusal names is kept by a step, and known later."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.budget import Budget, BudgetError
from memopt.calls.guard_fast_path import Kind
from memopt.cuda_graphs.reserve import CaptureReserve
from memopt.inductor.training import Training
from memopt.step import budget_trial, trial_steps, verified_minimum
from memopt.step.trial_step import Short, TrialMemory, mutated
from memopt.step.verified_minimum import VerifiedMinimums, verified
from tests.training.steps import gradients, make

pytestmark = pytest.mark.usefixtures("own_caches")


CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(missing_compiler(CPU) is not None, reason="no C++ compiler")


@pytest.fixture
def lossy(monkeypatch):
    """An allocator on CPU, as it were, that holds a twentieth more than the tensors of a step."""
    limits, steps = [], []

    def held(device):
        return limits[-1] if limits else None

    def take(*args, held=False, **_):
        session = steps[-1]
        allocated = session.step.base + session.code_peak()
        reserved = allocated + allocated // 20
        if held and reserved > limits[-1]:
            return Short(reserved - limits[-1])
        return TrialMemory(allocated, reserved, 0)

    def measurable(session, hooks):
        steps.append(session)
        return None if hooks.captured is None or session.exact else mutated(hooks.captured)

    monkeypatch.setattr("memopt.calls.sessions.allow_limit", lambda owner, session, limit: limits.append(limit))
    monkeypatch.setattr(budget_trial, "held_bytes", held)
    monkeypatch.setattr(trial_steps, "take_step", take)
    monkeypatch.setattr(budget_trial, "measurable", measurable)
    monkeypatch.setattr(trial_steps, "allocated_after_gc", lambda device: 0)
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: None)
    return limits


@pytest.fixture
def attempts(monkeypatch):
    found, plain = [], Training._attempt

    def counted(self, *, planned):
        found.append(plain(self, planned=planned))
        return found[-1]

    monkeypatch.setattr(Training, "_attempt", counted)
    return found


def loss_of(run, x):
    loss = run(x)
    loss.backward()
    return loss.detach()


class Masked(nn.Module):
    """Reads what Inductor folds: of a graph that is lowered again, less is left than of one that is new."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        kinds = torch.full((x.shape[0], 1), 1)
        x = torch.where((kinds >= 0) & (kinds < 2) & (kinds != -1), x, 0.0)
        for layer in self.layers:
            x = x + torch.tanh(nn.functional.gelu(layer(x)).sigmoid() * x)
        return x.square().mean()


def masked():
    return Masked(), torch.randn(256, 32)


@pytest.mark.long
@needs_compiler
@pytest.mark.parametrize("made", [make, masked])
def test_what_is_named_was_kept_and_is_kept_by_whoever_asks_for_it(lossy, attempts, made):
    model, x = made()
    expected = loss_of(model, x), gradients(model)
    model.zero_grad()
    with pytest.raises(BudgetError) as refused:
        memopt.compile(model, 1, backend="inductor")(x)
    least = refused.value.minimum_bytes
    assert refused.value.budget_bytes == 1
    assert lossy[-1] == least, "the last of the limits under which steps were taken"

    torch._dynamo.reset()
    attempts.clear()
    run = memopt.compile(model, int(1.02 * least), backend="inductor")
    torch.testing.assert_close((loss_of(run, x), gradients(model)), expected)
    assert len(attempts) == 1, "it is where it was"
    assert run.report.peak_bytes * 1.05 <= 1.02 * least
    assert not run.report.notes


@needs_compiler
def test_a_refusal_leaves_the_limits_of_steps_as_they_were(lossy, monkeypatch):
    model, x = make(layers=1)
    run = memopt.compile(model, 1, backend="inductor")
    with pytest.raises(BudgetError):
        run(x)
    session = run._memopt.sessions[Kind(True, False).plan]
    guard = run._memopt.guards[session]
    assert guard.allowance is None and session.margin == 0 and not session.naming
    assert session.budget == Budget(1, None, "1")
    with pytest.raises(BudgetError) as again:
        run(x)
    assert again.value.budget_bytes == 1


class Device:
    """A session on a device on which steps keep a budget from `least` bytes on."""

    def __init__(self, least, device=CPU):
        self.least, self.budget, self.margin, self.asked = least, Budget(5, None, "5"), 7, []
        self.naming, self.capture_reserve = False, CaptureReserve()
        self.beyond = self.graph_pool = None
        self.resident = types.SimpleNamespace(device=device)

    def tighten(self, size):
        before, self.margin = self.margin, self.margin + size
        return before

    def loosen(self, before):
        self.margin = before

    def forget_plan(self):
        pass

    def lower(self):
        assert self.naming and self.margin == 0
        self.asked.append(self.budget.bytes)
        if self.budget.bytes < self.least:
            raise BudgetError(min(self.least, self.budget.bytes + 300), self.budget.bytes)
        return "program"


@pytest.fixture
def kept(monkeypatch):
    sizes = []
    monkeypatch.setattr(VerifiedMinimums, "put", lambda self, session, program, size: sizes.append(size))
    return sizes


@pytest.mark.parametrize(
    ("least", "asked"),
    [(1000, [1000]), (1200, [1000, 1200]), (1500, [1000, 1300, 1500]), (9000, [1000, 1300, 1600, 1900])],
)
def test_it_is_named_anew_until_it_is_kept(kept, least, asked):
    session = Device(least)
    found = verified(session, BudgetError(1000, 5), session.lower)
    assert session.asked == asked and kept == ([least] if least < 9000 else [])
    assert (found.minimum_bytes, found.budget_bytes) == (least if least < 9000 else 2200, 5)
    assert (session.budget.bytes, session.margin, session.naming) == (5, 7, False)


def test_what_no_step_was_taken_for_is_named_and_not_remembered(kept):
    session = Device(0)
    session.lower = lambda: None
    refused = BudgetError(1000, 5)
    assert verified(session, refused, session.lower) is refused and not kept


def test_what_is_named_again_grows(kept):
    session = Device(9000)
    session.lower = lambda: (_ for _ in ()).throw(BudgetError(10, 10))
    found = verified(session, BudgetError(25600, 5), session.lower)
    assert found.minimum_bytes == pytest.approx(25600 * (257 / 256) ** 4, abs=4)


def test_more_than_the_device_has_is_not_tried(kept, monkeypatch):
    session = Device(0, torch.device("cuda", 0))
    has = types.SimpleNamespace(total_memory=900)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: has)
    refused = BudgetError(1000, 5)
    assert verified(session, refused, session.lower) is refused and not session.asked


@pytest.mark.parametrize(("budget", "served"), [(999, False), (1000, True), (1040, True), (1041, False)])
def test_it_serves_budgets_a_little_above_it(monkeypatch, budget, served):
    monkeypatch.setattr(verified_minimum, "step_facts", lambda session, program: {"graph": program})
    session = types.SimpleNamespace(budget=Budget(budget, None, ""), margin=0)
    assert VerifiedMinimums().near(session, "program") is None
    assert VerifiedMinimums().put(session, "program", 1000)
    assert VerifiedMinimums().near(session, "program") == (1000 if served else None)
    assert VerifiedMinimums().near(session, "another") is None
    session.margin = 1
    assert VerifiedMinimums().near(session, "program") is None, "it is planned for less, for what a step has shown"
    session.budget, session.margin = Budget(None, 0.5, ""), 0
    assert VerifiedMinimums().near(session, "program") is None, "a share is of what is not known yet"


@pytest.mark.parametrize("record", [{}, {"minimum_bytes": "1000"}, {"minimum_bytes": -1}, {"minimum_bytes": True}])
def test_records_of_another_form_are_absent(monkeypatch, record):
    monkeypatch.setattr(verified_minimum, "step_facts", lambda session, program: {"graph": program})
    session = types.SimpleNamespace(budget=Budget(1000, None, ""), margin=0)
    leasts = VerifiedMinimums()
    leasts._store.put(verified_minimum.versions(), verified_minimum._key(session, "program"), record)
    assert leasts.near(session, "program") is None
