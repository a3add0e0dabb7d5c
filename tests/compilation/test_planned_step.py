"""The plan of a step: what an attempt at another one is made with, and what is as before once it is given up."""

import pytest
import torch

from memopt.backends.aten import AtenBackend
from memopt.budget import parse_budget
from memopt.compilation.planned_step import PlannedStep
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident
from memopt.step.rewriting import Rewriting


@pytest.fixture
def step():
    table = CostTable()
    found = PlannedStep(parse_budget("1GB"), Resident(), Rewriting((), AtenBackend(), table), table, True)
    return found


def test_an_attempt_for_less_is_taken_back_with_what_was_said_of_it(step):
    step.note("before")
    before = step.tighten(100)
    step.note("of the attempt")
    assert step.margin == 100 and step.notes == ["before", "of the attempt"]
    step.loosen(before)
    assert step.margin == 0 and step.notes == ["before"]


def test_a_graph_that_runs_operator_by_operator_has_another_plan_than_its_code(step):
    code = step.known("graph")
    with pytest.raises(ValueError), step.operator_by_operator():
        assert step.exact and step.known("graph") != code
        raise ValueError
    assert not step.exact and step.known("graph") == code


def test_only_a_limit_that_is_aimed_at_is_given_up(step):
    assert not step.aim_no_more() and step.budget is not None
    step.soft = True
    assert step.aim_no_more() and step.budget is None and not step.soft


def test_an_engine_may_try_its_own_partition_of_one_graph_or_without_a_budget(step):
    assert step.may_leave(graph_break=False) and not step.may_leave(graph_break=True)
    step.budget = None
    assert step.may_leave(graph_break=True)


@pytest.mark.parametrize(("graphs", "device", "left"), [(2, "cuda", 3000), (2, "cpu", 0), (1, "cuda", 0)])
def test_what_is_sent_behind_several_graphs_is_left_a_place_of_its_own(step, graphs, device, left):
    step.counts_resident(Resident(sent_in_blocks=3000, device=torch.device(device)))
    step.reserves_for_capture([None] * graphs, 10**9)
    assert step.capture_reserve.bytes == left
    step.reserves_for_capture([None] * graphs, None)
    assert step.capture_reserve.bytes == 0
