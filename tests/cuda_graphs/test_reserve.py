"""What is left of a budget for a CUDA graph before there is code."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt.calls.sessions import Sessions
from memopt.comparison.steps import call, loss_of
from memopt.cuda_graphs import reserve
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.reserve import CaptureReserve, reserved_bytes
from memopt.memory.cost.table import OperatorCost
from tests.cuda_graphs.tape import Tape


def cost(seconds):
    return OperatorCost(seconds, 0, 0, False)


def test_something_is_left_where_the_device_may_wait_for_its_host():
    waits, works = [cost(5e-6)] * 100 + [cost(0.0)] * 900, [cost(5e-4)] * 100 + [cost(0.0)] * 10**5
    assert reserved_bytes(waits, 640 * 10**6, 3000) == 10 * 10**6 + 32 * 2**20 + 3000
    assert reserved_bytes(works, 640 * 10**6, 3000) == 0
    assert reserved_bytes(waits, 64 * 10**6, 0) == 5 * 10**6, "of a small budget not half"


def test_what_was_given_up_is_left_no_more():
    waits, left = [cost(5e-6)] * 100, CaptureReserve()
    assert not left.give_up() and left.wanted, "there was nothing to give up"
    left.leave(waits, 640 * 10**6, 3000)
    assert left.bytes == reserved_bytes(waits, 640 * 10**6, 3000)
    assert left.give_up() and left.bytes == 0
    left.leave(waits, 640 * 10**6, 3000)
    assert left.bytes == 0


def test_a_place_for_what_is_sent_is_left_until_it_is_given_up():
    left = CaptureReserve()
    left.leave_in_one(3000)
    assert left.bytes == 3000 and left.give_up()
    left.leave_in_one(3000)
    assert left.bytes == 0 and not left.give_up()


@pytest.fixture
def planned(monkeypatch):
    """Compile and take a step of a small model within a budget; its report."""

    def plan(budget, captured=True):
        torch._dynamo.reset()
        monkeypatch.setattr(Sessions, "_graph_pool_here", lambda self: GraphPool(Tape()) if captured else None)
        torch.manual_seed(0)
        model = memopt.models.build("gpt2", tiny=True, layers=2, dropout=0.0).train()
        run = memopt.compile(model, budget, backend="inductor")
        loss_of(call(run, model.example_inputs(batch=4, labels=True))).backward()
        return run.report

    monkeypatch.setattr(reserve, "_SEGMENTS", 0)
    return plan


@pytest.mark.long
def test_a_plan_leaves_room_for_a_cuda_graph_where_there_is_some(planned):
    budget = planned(planned(None, captured=False).peak_bytes, captured=False).peak_bytes
    assert planned(budget, captured=False).peak_bytes == budget
    assert planned(budget).peak_bytes <= budget - budget // 64


@pytest.mark.long
def test_all_of_a_budget_is_planned_with_where_it_is_short(planned):
    with pytest.raises(memopt.BudgetError) as refusal:
        planned(1, captured=False)
    report = planned(refusal.value.minimum_bytes)
    assert report.peak_bytes <= refusal.value.minimum_bytes
