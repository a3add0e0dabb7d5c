"""How a planned step stands to its budget: by its plan, and by the code that an engine makes of it."""

import dataclasses

import pytest

from memopt.budget import BudgetError
from memopt.memory.cost.table import OperatorCost
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.resident import Resident
from memopt.step.budget_state import BudgetState, Step
from memopt.step.curve import CurvePoint
from memopt.step.graph_peaks import GraphPeaks, peaks_of, step_peak
from memopt.step.planned import fingerprint, predicted_peak
from memopt.step.planner import StepPlan
from tests.step.test_planned import planned, program

BASE = 1000


def standing(*programs, limit=None, resident=None):
    """A step of these graphs as they are, beside 1,000 bytes that are resident."""
    items = tuple(planned(item) for item in programs)
    peak = predicted_peak(items)
    found = BudgetState(None, resident or Resident(parameters=BASE))
    plan = StepPlan((), peak, peak, True)
    found.step = Step(tuple(map(fingerprint, programs)), items, plan, peak, BASE, limit)
    return found


def test_before_a_step_is_planned_there_is_no_budget_to_exceed():
    nothing = BudgetState(None, Resident())
    assert nothing.limit_bytes == 0 and nothing.feasible
    assert not (
        nothing.one_graph or nothing.tight or nothing.recomputes or nothing.coded() or nothing.excess_with(10**9)
    )


def test_the_share_computed_again_is_of_the_operators_that_are_asked_for():
    one = program()
    product, other, *_ = one.calls
    costs = {node.name: OperatorCost(float(seconds), 0, 0, False) for seconds, node in ((3, product), (5, other))}
    step = standing(one)
    assert step.share_again(lambda node: True) == 0.0, "there is no plan"
    (item,) = step.step.planned
    step.step = dataclasses.replace(step.step, planned=(dataclasses.replace(item, costs=costs, choice=object()),))
    assert step.share_again(lambda node: True) == 0.0, "nothing is recomputed"
    one.calls[-1].meta["recomputes"] = product.name
    assert step.share_again(lambda node: True) == 3.0 / 8.0
    assert step.share_again(lambda node: node is product) == 0.0


def test_code_takes_the_place_of_a_graph_s_own_operations():
    first, second = program(), program(layers=4)
    step = standing(first, second, limit=10**9)
    assert not step.one_graph and standing(first).one_graph
    plain = [peaks_of(item, planned(item).timeline) for item in (first, second)]
    assert step.code_peak() == step_peak(plain) and not step.coded()
    code = dataclasses.replace(plain[0], backward=10 * plain[0].backward)
    step._emitted[fingerprint(first)] = code
    assert step.code_peak() == step_peak([code, plain[1]]) > step_peak(plain)
    step._emitted[fingerprint(second)] = plain[1]
    assert step.coded()
    step.withdraw(None)
    assert step.coded()
    step.withdraw(first)
    assert step.code_peak() == step_peak(plain) and not step.coded()
    step._emitted[fingerprint(first)] = code
    step.forget_code()
    assert step._emitted == {}


def test_code_is_judged_with_all_that_is_resident():
    one = program()
    step = standing(one, limit=50_000)
    step._emitted[fingerprint(one)] = GraphPeaks(forward=10, backward=48_000, saved=5, left=5)
    assert step.judged() == (step.step.plan.peak_bytes - 48_000, BASE + 48_000 - 50_000)
    assert step.unused() == max(0, 50_000 - BASE - 48_000)
    assert standing(one, limit=BASE + 50_000_000).unused() > 0 == BudgetState(None, Resident()).unused()
    assert (step.excess_with(49_001), step.excess_with(49_000)) == (1, 0)
    footprint = OptimizerFootprint(state_bytes=60_000, existing_state_bytes=0, step_peak_bytes=0)
    step = standing(one, limit=50_000, resident=Resident(parameters=BASE, optimizer=footprint))
    assert step.judged()[1] == step.optimizer_peak() - 50_000 > 0
    assert standing(one).judged() == (0, None)


def test_a_budget_is_tight_below_half_of_what_the_step_adds():
    peak = standing(program()).step.plain
    assert standing(program(), limit=BASE + peak // 2 - 1).tight
    assert not standing(program(), limit=BASE + peak // 2 + 1).tight
    assert not standing(program()).tight


@pytest.mark.parametrize(("taken", "named"), [(None, 900), (950, 900), (700, 700)])
def test_a_refusal_names_no_more_than_known_code_takes(taken, named):
    def refuse():
        raise BudgetError(900, 100)

    with pytest.raises(BudgetError) as found:
        standing(program()).refused_at_most(refuse, taken)
    assert (found.value.minimum_bytes, found.value.budget_bytes) == (named, 100)
    assert standing(program()).refused_at_most(lambda: "run", taken) == "run"


def test_what_more_room_would_gain_is_read_off_the_curve():
    step = standing(program(), limit=50_000)
    assert step.gain(1000) == 1.0, "without a curve nothing is known"
    points = [CurvePoint(9000, 1.0, 0.0), CurvePoint(8000, 1.25, 0.25), CurvePoint(5000, 2.0, 1.0, chosen=True)]
    step.step = dataclasses.replace(step.step, plan=dataclasses.replace(step.step.plan, curve=tuple(points)))
    assert [step.gain(more) for more in (0, 2999, 3000, 4000, 10**6)] == [0.0, 0.0, 0.375, 0.5, 0.5]
