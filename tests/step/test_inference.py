"""Inference programs of one model: what is planned, what runs are held to, and what a budget that is not kept says."""

import dataclasses

import pytest
import torch
from torch import nn

from memopt.api import make_options
from memopt.budget import BudgetError, parse_budget
from memopt.compilation.session import Session
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.passes.chunk_batch import ChunkBatch
from memopt.step import inference_plan
from memopt.step.call_role import CallRole
from memopt.step.inference import emitted_inference, plan_for_less, plan_inference, settling
from tests.support import capture, run

RESIDENT = Resident(parameters=1000, inputs=500)


class Chain(nn.Module):
    """Rows of 32 numbers that grow to 512 and shrink again."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


def session_with(budget):
    options = make_options(backend="aten", device=torch.device("cpu"))
    return Session(
        budget=None if budget is None else parse_budget(budget),
        backend=options.engine,
        passes=None,
        verify=False,
        names=dict,
        resident=RESIDENT,
        table=CostTable(),
    )


@pytest.fixture(scope="module")
def program():
    return capture(Chain().eval(), torch.randn(16, 32))


def test_without_a_budget_all_is_settled_and_on_record(program):
    session = session_with(None)
    planned = plan_inference(session, program)
    assert session.inferred.planned is planned and session.inferred.unused == 0
    assert session.report.peak_bytes == RESIDENT.total + planned.timeline.peak_bytes
    settling(session)(10**12)
    assert session.report.measured_peak_bytes == RESIDENT.total + 10**12
    assert emitted_inference(session, 10**12) is None


def test_a_budget_that_is_too_small_is_met_in_chunks_of_the_batch(program):
    whole = plan_inference(session_with(None), program).timeline.peak_bytes
    session = session_with(f"{RESIDENT.total + whole // 2}B")
    planned = plan_inference(session, program)
    assert 0 < planned.timeline.peak_bytes <= whole // 2
    assert session.inferred.unused == whole // 2 - planned.timeline.peak_bytes
    x = torch.randn(16, 32)
    torch.testing.assert_close(run(planned.program, x), run(program, x))


def test_a_run_that_took_more_is_over_the_budget_and_the_next_plan_is_for_less(program):
    whole = plan_inference(session_with(None), program).timeline.peak_bytes
    session = session_with(f"{RESIDENT.total + whole}B")
    planned = plan_inference(session, program)
    settle = settling(session)
    settle(None)
    settle(whole)
    with pytest.raises(BudgetError) as caught:
        settle(whole + 700)
    assert caught.value.minimum_bytes == caught.value.budget_bytes + 700
    assert plan_for_less(session, caught.value)
    least = session.report.budget_bytes // 20
    assert session.inferred.spared == max(700, least)
    again = plan_inference(session, program)
    assert again.timeline.peak_bytes <= planned.timeline.peak_bytes - session.inferred.spared


def test_a_run_without_memory_left_is_over_the_budget_whatever_was_seen(program):
    session = session_with("1MB")
    plan_inference(session, program)
    with pytest.raises(BudgetError) as caught:
        settling(session)(None, short=True)
    assert caught.value.minimum_bytes == 10**6 + 10**6 // 20


def test_code_of_an_engine_counts_by_what_it_says(program):
    session = session_with("1MB")
    plan_inference(session, program)
    assert emitted_inference(session, 10**6) == RESIDENT.total
    assert emitted_inference(session, 10) == RESIDENT.total + 10 - 10**6
    assert session.report.peak_bytes == RESIDENT.total + 10


def test_what_no_plan_keeps_is_refused_with_the_reason_and_cannot_be_planned_for_less():
    class Fixed(nn.Module):
        def forward(self, x):
            return (x @ x.t()).softmax(0)

    program = capture(Fixed(), torch.randn(32, 32))
    session = session_with(f"{RESIDENT.total + 100}B")
    with pytest.raises(BudgetError, match="its batch cannot be run in chunks") as caught:
        plan_inference(session, program)
    assert "\n" not in str(caught.value) and plan_for_less(session, caught.value)
    with pytest.raises(BudgetError) as again:  # for nothing
        plan_inference(session, program)
    assert again.value.minimum_bytes == caught.value.minimum_bytes and not plan_for_less(session, again.value)
    assert plan_inference(session, program, by_timeline=False) is session.inferred.planned, "the engine decides"


def test_a_training_step_over_the_budget_is_not_explained_by_an_inference_program():
    session = session_with("2000B")
    plan_inference(session, capture(nn.ReLU(), torch.randn(4)))
    session.inferred.not_in_chunks = "a reason"
    assert "chunks" not in str(session.over(3000, 2000))


def deep(count):
    layers = [layer for _ in range(count) for layer in (nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))]
    return capture(nn.Sequential(*layers).eval(), torch.randn(64, 32))


def test_a_hopeless_budget_is_refused_by_figures_and_the_least_that_it_names_can_be_kept(monkeypatch):
    program, made = deep(12), []
    run_pass = ChunkBatch.run
    monkeypatch.setattr(ChunkBatch, "run", lambda self, program: made.append(1) or run_pass(self, program))
    session = session_with("1B")
    with pytest.raises(BudgetError) as caught:
        plan_inference(session, program, by_timeline=False)
    assert not made and not plan_for_less(session, caught.value)
    least = caught.value.minimum_bytes
    assert session.report.peak_bytes == least
    whole = plan_inference(session_with(None), program).timeline.peak_bytes
    planned = plan_inference(session_with(f"{least}B"), program)
    assert made and RESIDENT.total + planned.timeline.peak_bytes <= least < RESIDENT.total + whole
    x = torch.randn(64, 32)
    torch.testing.assert_close(run(planned.program, x), run(program, x))


def test_where_a_plan_is_soon_made_or_not_far_away_it_is_made(monkeypatch):
    few, many = deep(2), deep(12)
    with pytest.raises(BudgetError):
        plan_inference(session_with("1B"), few)
    with pytest.raises(BudgetError) as caught:
        plan_inference(session_with("1B"), many)
    monkeypatch.setattr(inference_plan, "HopelessError", None)
    near = caught.value.minimum_bytes - (caught.value.minimum_bytes - RESIDENT.total) // 4
    with pytest.raises(BudgetError) as made:
        plan_inference(session_with(f"{near}B"), many)
    assert made.value.minimum_bytes <= caught.value.minimum_bytes


@pytest.mark.parametrize("trains", [False, True])
def test_an_engine_that_measures_counts_libraries_in_its_runs_but_a_training_step_has_other_graphs(
    program, monkeypatch, trains
):
    session = session_with(None)
    session.resident = dataclasses.replace(RESIDENT, libraries=64)
    session.role = CallRole(trains=trains)
    monkeypatch.setattr(type(session.engine()), "measures", True)
    plan_inference(session, program)
    assert session.resident.libraries == (64 if trains else 0)
