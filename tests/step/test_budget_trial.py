"""A step that is taken before the caller's: what comes of what it finds."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch._functorch._aot_autograd import graph_compile

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.calls.guard_fast_path import Kind
from memopt.compilation.session import Session
from memopt.step import budget_trial, trial_steps
from memopt.step.search import StepSearch
from memopt.step.trial_step import Short, TrialMemory, mutated
from tests.training.steps import assert_equal, gradients, make, step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


CPU = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch):
    """Take steps on CPU as if a device were there; each reserves what `figures` says next.

    Held to the budget it hands blocks back where it would reserve more.
    """
    figures, last = [], []

    def take(*args, held=False, **_):
        if not held:
            last[:] = [figures.pop(0)]
        elif last[0].reserved_bytes > budget_trial.held_bytes(CPU):
            return dataclasses.replace(last[0], retries=1)
        return last[0]

    def choose(*taken):
        figures.extend(taken)
        real = budget_trial.measurable

        def measurable(session, hooks):
            exact, session.exact = session.exact, False
            try:
                place = session.resident.device
                return mutated(hooks.captured) if hooks.captured is not None and place == CPU else None
            finally:
                session.exact = exact

        assert real is not None
        monkeypatch.setattr(budget_trial, "measurable", measurable)
        monkeypatch.setattr(trial_steps, "take_step", take)
        monkeypatch.setattr(trial_steps, "allocated_after_gc", lambda device: 0)
        return figures

    return choose


def budget_and_session(monkeypatch, share=0.8, layers=4):
    model, x = make(dropout=0.2, layers=layers)
    free = memopt.plan(model, x)
    torch._dynamo.reset()
    budget = int(free.minimum_bytes + share * (free.unconstrained_bytes - free.minimum_bytes))
    monkeypatch.setattr(budget_trial, "held_bytes", lambda device: budget)
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: None)
    return model, x, budget


def test_a_step_that_reserves_more_is_planned_for_less(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    expected = step(model, x), gradients(model)
    model.zero_grad()
    grown = []
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: grown.append(size))
    left = steps(TrialMemory(budget, budget + 20_000, 0), TrialMemory(budget - 30_000, budget - 100, 50))
    run = memopt.compile(model, budget, backend="aten")
    assert_equal((step(run, x), gradients(model)), expected)
    assert not left
    assert run.report.peak_bytes <= budget - 20_000
    assert run.report.measured_peak_bytes == budget - 30_000
    assert grown == [budget] * 2 + [budget - 100] * 2  # before each step and after it
    assert run._memopt.sessions[Kind(True, False).plan].beyond == budget - 150
    assert not run.report.notes


@pytest.mark.long
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_a_step_that_is_planned_for_less_is_not_searched_again(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    left = steps(TrialMemory(budget, budget + 20_000, 0), TrialMemory(budget - 30_000, budget - 100, 50))
    searches = []

    class Counted(StepSearch):
        def __init__(self, *args, **options):
            searches.append(self)
            super().__init__(*args, **options)

    monkeypatch.setattr("memopt.compilation.planned_step.StepSearch", Counted)
    traces, plain = [], graph_compile.aot_dispatch_autograd_graph

    def traced(*args, **options):
        traces.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(graph_compile, "aot_dispatch_autograd_graph", traced)
    run = memopt.compile(model, budget, backend="inductor")
    step(run, x)
    assert not left and len(searches) == len(traces) == 1
    assert run._memopt.sessions[Kind(True, False).plan].kept_search.lowerings(None) == []


def test_a_step_that_would_reserve_more_and_runs_within_the_limit_is_taken(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    plain = memopt.compile(model, budget, backend="aten")
    step(plain, x)
    model.zero_grad()
    torch._dynamo.reset()
    steps()
    taken = {False: TrialMemory(budget - 10, budget + 20_000, 50), True: TrialMemory(budget - 10, budget - 5, 50)}
    monkeypatch.setattr(trial_steps, "take_step", lambda *args, held=False, **_: taken[held])
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    assert run.report.peak_bytes == plain.report.peak_bytes and not run.report.notes
    assert run._memopt.sessions[Kind(True, False).plan].beyond == budget - 50


@pytest.mark.quick("no more-runs out", "more-hands back")
@pytest.mark.parametrize("held", [TrialMemory(100, 100, 0, retries=1), Short()], ids=["hands back", "runs out"])
@pytest.mark.parametrize("over", [20_000, -1], ids=["more", "no more"])
def test_a_step_that_is_slow_within_the_limit_or_runs_out_is_planned_for_less(monkeypatch, steps, over, held):
    model, x, budget = budget_and_session(monkeypatch)
    first, second = TrialMemory(budget - 10, budget + over, 0), TrialMemory(budget - 30_000, budget - 100, 50)
    left, now = steps(first, second), []

    def take(*args, **options):
        if not options.get("held"):
            now[:] = [left.pop(0)]
            return now[0]
        return held if now[0] is first else second

    monkeypatch.setattr(trial_steps, "take_step", take)
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    assert not left and run.report.peak_bytes <= budget - max(
        over, budget // (50 if isinstance(held, TrialMemory) else 16)
    )


def test_a_step_that_runs_out_of_memory_however_little_is_planned_is_refused(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    steps()
    taken = TrialMemory(budget - 10, budget - 5, 50)
    monkeypatch.setattr(trial_steps, "take_step", lambda *args, held=False, **_: Short() if held else taken)
    start = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(memopt.BudgetError) as found:
        memopt.compile(model, budget, backend="aten")(x)
    assert found.value.minimum_bytes > budget == found.value.budget_bytes
    assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items())


@pytest.mark.long
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_code_that_runs_out_of_memory_however_little_is_planned_gives_way_to_operators(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    steps()
    taken, fails = TrialMemory(budget - 10, budget - 5, 50), []

    def take(*args, held=False, **_):
        fails.append(run._memopt.sessions[Kind(True, False).plan].code_fails)
        return Short() if held and not fails[-1] else taken

    monkeypatch.setattr(trial_steps, "take_step", take)
    run = memopt.compile(model, budget, backend="inductor")
    torch.testing.assert_close(step(run, x), step(model, x))
    assert fails[0] is False and fails[-1] is True
    (note,) = run.report.notes
    assert "operator by operator" in note and run.report.peak_bytes <= budget
    assert run._memopt.sessions[Kind(True, False).plan].margin == 0


@pytest.mark.quick("more")
@pytest.mark.parametrize("least", [1.01, 9.0], ids=["less than code", "more"])
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_where_operators_do_not_keep_the_budget_either_the_lesser_need_is_named(monkeypatch, steps, least):
    model, x, budget = budget_and_session(monkeypatch, layers=1)
    steps()
    taken = TrialMemory(budget - 10, budget - 5, 50)
    monkeypatch.setattr(trial_steps, "take_step", lambda *args, held=False, **_: Short() if held else taken)

    def refused(self, known):
        raise memopt.BudgetError(int(least * budget), budget)

    monkeypatch.setattr("memopt.inductor.training.Training._operator_by_operator", refused)
    monkeypatch.setattr(budget_trial, "verified", lambda session, refused, lower: refused)
    monkeypatch.setattr(budget_trial, "_ROUNDS", 0)  # what is planned for less is not asked here
    with pytest.raises(memopt.BudgetError) as found:
        memopt.compile(model, budget, backend="inductor")(x)
    assert found.value.minimum_bytes == min(int(least * budget), budget + budget // 16)


@pytest.mark.parametrize(("stuck", "said"), [(30 * 2**20, 30 * 2**20), (20 * 2**20, 0)], ids=["much", "little"])
def test_a_refusal_says_what_the_allocator_cannot_hand_back(monkeypatch, stuck, said):
    monkeypatch.setattr(budget_trial, "stuck_bytes", lambda device: stuck)
    refused = memopt.BudgetError(2 * 10**9, 10**9)
    assert budget_trial._explained(refused, torch.device("cpu")) is refused
    found = budget_trial._explained(refused, torch.device("cuda"))
    assert found.stuck_bytes == said
    assert (found.minimum_bytes, found.budget_bytes) == (2 * 10**9, 10**9)


def test_the_optimizer_s_state_that_is_to_come_has_its_place_in_the_step_that_is_taken(monkeypatch, steps):
    model, x, _ = budget_and_session(monkeypatch)
    optimizer = torch.optim.Adam(model.parameters())
    monkeypatch.setattr(budget_trial, "held_bytes", lambda device: 10**9)
    asked, plain = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **options: asked.append(size) or plain(size, **options))
    steps(TrialMemory(5 * 10**8, 6 * 10**8, 100))
    grown = []
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: grown.append(size))
    run = memopt.compile(model, 10**9, backend="aten", optimizer=optimizer)
    step(run, x)
    session = run._memopt.sessions[Kind(True, False).plan]
    coming = session.resident.coming
    assert coming > 0 and coming in asked
    assert grown == [6 * 10**8 + coming] * 2 and session.beyond == 6 * 10**8 - 100


def test_what_a_step_leaves_to_libraries_is_theirs_and_counts(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    counted, limits = [], []
    monkeypatch.setattr("memopt.step.memory_ledger.count_library_bytes", lambda device, size: counted.append(size))
    left = steps(TrialMemory(budget // 2, budget // 2, 50, kept_bytes=640), TrialMemory(budget // 2, budget // 2, 50))
    run = memopt.compile(model, budget, backend="aten")
    monkeypatch.setattr("memopt.calls.sessions.Sessions.allow", lambda self, session, size: limits.append(size))
    step(run, x)
    assert counted == [640] and len(left) == 1
    assert run._memopt.sessions[Kind(True, False).plan].resident.libraries == 640 and limits == [budget, budget]


def test_what_is_counted_as_libraries_already_is_not_counted_twice(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    counted = []
    monkeypatch.setattr("memopt.step.memory_ledger.count_library_bytes", lambda device, size: counted.append(size))
    monkeypatch.setattr("memopt.memory.resident.library_bytes", lambda device: 600)
    steps(TrialMemory(budget // 2, budget // 2, 50, kept_bytes=640))
    step(memopt.compile(model, budget, backend="aten"), x)
    assert counted == [40]


def test_buffers_that_were_left_out_are_known_all_the_same(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    counted = []
    monkeypatch.setattr("memopt.step.memory_ledger.count_library_bytes", lambda device, size: counted.append(size))
    monkeypatch.setattr("memopt.step.memory_ledger.library_bytes", lambda device: 600)
    monkeypatch.setattr("memopt.step.memory_ledger.may_multiply", lambda program: False)
    plain = memopt.compile(model, budget, backend="aten")
    steps(TrialMemory(budget // 2, budget // 2, 50))
    step(plain, x)
    torch._dynamo.reset()
    model.zero_grad()
    steps(TrialMemory(budget // 2, budget // 2, 50, kept_bytes=640))
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    assert counted == [40] and run._memopt.sessions[Kind(True, False).plan].resident.libraries == 640
    assert run.report.peak_bytes == plain.report.peak_bytes + 640 == run.report.breakdown.total


def test_memory_that_runs_out_is_answered_the_same_way(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    steps(Short(), TrialMemory(budget // 2, budget, 0))
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    assert run.report.peak_bytes <= budget - budget // 16


@pytest.mark.quick("without it")
@pytest.mark.parametrize("first", [False, True], ids=["within the limit", "without it"])
def test_what_others_hold_is_no_fault_of_the_plan(monkeypatch, steps, first):
    model, x, budget = budget_and_session(monkeypatch)
    steps()
    taken = TrialMemory(budget - 10, budget - 5, 50)
    short = Short(others=True)
    monkeypatch.setattr(trial_steps, "take_step", lambda *args, held=False, **_: short if held or first else taken)
    run = memopt.compile(model, budget, backend="aten")
    expected = step(model, x), gradients(model)
    model.zero_grad()
    assert_equal((step(run, x), gradients(model)), expected)
    (note,) = run.report.notes
    assert "for what others hold" in note and run.report.peak_bytes <= budget


@pytest.mark.quick("5000")
@pytest.mark.parametrize("unused", [0, 5000])
def test_at_first_it_is_planned_for_less_by_what_was_missing(monkeypatch, steps, unused):
    model, x, budget = budget_and_session(monkeypatch)
    monkeypatch.setattr(Session, "unused", lambda self: unused)  # a plan for that much more was no larger
    first, second = TrialMemory(budget - 10, budget - 5, 0), TrialMemory(budget - 30_000, budget - 100, 50)
    left, now, asked = steps(first, second), [], []

    def take(*args, held=False, **_):
        now[:] = now if held else [left.pop(0)]
        return Short(1000) if held and now[0] is first else now[0]

    tighten = Session.tighten
    monkeypatch.setattr(trial_steps, "take_step", take)
    monkeypatch.setattr(Session, "tighten", lambda self, size: asked.append(size) or tighten(self, size))
    step(memopt.compile(model, budget, backend="aten"), x)
    over = 1000 + budget // 256
    assert not left and asked == [over + over // 8 + unused]


def test_where_less_is_not_to_be_had_the_first_plan_stays_and_says_so(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch, share=0.1)
    left = steps(TrialMemory(budget, 2 * budget, 0))
    run = memopt.compile(model, budget, backend="aten")
    expected = step(model, x), gradients(model)
    model.zero_grad()
    assert_equal((step(run, x), gradients(model)), expected)
    assert not left and budget >= run.report.peak_bytes
    (note,) = run.report.notes
    assert "held to the budget" in note


def test_what_is_said_of_an_attempt_that_is_dropped_is_dropped_with_it(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch, share=0.1)
    steps(TrialMemory(budget, 2 * budget, 0))
    tighten = Session.tighten

    def and_says(self, size):
        before = tighten(self, size)
        self.note("no code was found for less")
        return before

    monkeypatch.setattr(Session, "tighten", and_says)
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    (note,) = run.report.notes
    assert "held to the budget" in note


def test_after_some_rounds_the_last_plan_stays_measured_and_says_so(monkeypatch, steps):
    model, x, budget = budget_and_session(monkeypatch)
    left = steps(*(TrialMemory(budget - over, budget + over, 0) for over in (3000, 2000, 1000)))
    run = memopt.compile(model, budget, backend="aten")
    step(run, x)
    assert not left and run.report.peak_bytes <= budget - 5000
    assert run.report.measured_peak_bytes == budget - 1000
    (note,) = run.report.notes
    assert "held to the budget" in note


@pytest.mark.quick("fits")
@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
@pytest.mark.parametrize("over", [0, 5000], ids=["fits", "does not"])
def test_of_code_that_lacks_only_what_the_allocator_may_lose_the_step_decides(monkeypatch, steps, over):
    model, x = make(dropout=0.2)
    free = memopt.compile(model, backend="inductor")
    step(free, x)
    model.zero_grad()
    torch._dynamo.reset()
    budget = free.report.peak_bytes
    monkeypatch.setattr(budget_trial, "held_bytes", lambda device: budget)
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: None)
    monkeypatch.setattr("memopt.step.memory_ledger.slack_bytes", lambda limit, device: 2000)
    left = steps(TrialMemory(budget, budget + over, 0), *[TrialMemory(budget, budget, 0)] * bool(over))
    run = memopt.compile(model, budget, backend="inductor")
    step(run, x)
    assert not left
    if over:
        assert run.report.peak_bytes <= budget - 2000 - over
    else:
        assert run.report.peak_bytes == budget
