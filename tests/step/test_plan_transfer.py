"""Plans carried over from one size to another: the checker's word, and what is kept of which step."""

from __future__ import annotations

import itertools

import pytest
import torch

import memopt
from memopt.memory.cost.table import CostTable
from memopt.solve.check import check
from memopt.solve.recompute import curve
from memopt.solve.schedule import Schedule, ScheduleError
from memopt.step import plan_transfer
from memopt.step.encode_step import lower
from memopt.step.plan_transfer import Sizes, TransferredPlan, carried_curve, carried_from, names_of, spread, structure
from tests.passes.build import residual


def program(rows=64, layers=4):
    return residual(layers, rows)


def lowered(rows=64, layers=4):
    item = program(rows, layers)
    return lower(item, CostTable(limit_bytes=0).measure_all(item))


def found(lowering):
    points = curve(lowering.problem, seconds=0.5).points
    return names_of(lowering), [point.schedule for point in points]


@pytest.mark.quick("96")
@pytest.mark.parametrize("rows", [8, 64, 96])
def test_a_curve_of_another_size_is_counted_anew(rows):
    names, schedules = found(lowered())
    lowering = lowered(rows)
    taken = carried_curve(lowering, names, schedules).points
    assert len(taken) > 2 and taken[0].extra_seconds == 0
    for point in taken:
        check(lowering.problem, point.schedule, point.peak_bytes)
    for more, less in itertools.pairwise(taken):
        assert more.peak_bytes > less.peak_bytes and more.seconds <= less.seconds


def test_other_operations_are_refused():
    names, schedules = found(lowered())
    with pytest.raises(ScheduleError, match="others"):
        carried_curve(lowered(layers=3), names, schedules)


@pytest.mark.parametrize("steps", [(10**6,), (-1,), (1, 0), ()])
def test_a_schedule_that_is_none_is_refused(steps):
    lowering = lowered()
    with pytest.raises((ScheduleError, ValueError)):
        carried_curve(lowering, names_of(lowering), [Schedule(steps, lowering.problem.forward)])


def test_a_structure_knows_no_sizes():
    assert structure(program(8)) == structure(program(64)) != structure(program(layers=3))


def test_of_many_schedules_some_are_carried():
    many = [Schedule((number,), 1) for number in range(1000)]
    assert spread(many[:5]) == tuple(many[:5])
    some = spread(many)
    assert len(some) == plan_transfer._CARRIED and some[0] == many[0] and some[-1] == many[-1]


def plan(size):
    return TransferredPlan((), ((),), ((),), size)


def test_smaller_steps_are_served_and_larger_ones_searched_for():
    sizes, items = Sizes(), [program()]
    assert sizes.proposal(items, 50) is None
    sizes.keep(items, plan(50), searched=True)
    assert sizes.proposal(items, 50) == sizes.proposal(items, 20) == plan(50)
    assert sizes.proposal(items, 51) is None and sizes.proposal([program(layers=3)], 20) is None
    sizes.keep(items, plan(40), searched=False)
    assert sizes.proposal(items, 10) == plan(50)
    sizes.keep(items, plan(60), searched=True)
    assert sizes.proposal(items, 55) == plan(60)


def test_after_so_many_searches_the_largest_serves_larger_ones_too():
    sizes, items = Sizes(), [program()]
    for size in range(1, plan_transfer.SEARCHES + 1):
        assert not sizes.exhausted
        sizes.keep(items, plan(size), searched=True)
    assert sizes.exhausted and sizes.proposal(items, 10**6) == plan(plan_transfer.SEARCHES)


def test_what_is_carried_from_a_plan():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    torch._dynamo.reset()
    kept = []
    keep = Sizes.keep
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sizes, "keep", lambda self, items, plan, **o: kept.append(plan) or keep(self, items, plan, **o))
        memopt.plan(model, torch.ones(4, 8), 1.0)
    (one,) = kept
    assert len(one.operations) == len(one.schedules) == 1 and one.plain_bytes > 0
    assert carried_from((), (), 3) == TransferredPlan((), (), (), 3)
