"""A step within its loop: what that holds is judged beside what was planned."""

import dataclasses

from memopt.budget import parse_budget
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.resident import Resident
from memopt.step.budget_state import Step
from memopt.step.earlier_calls import Figures, Ran
from memopt.step.graph_peaks import GraphPeaks
from memopt.step.loop_bytes import Seen
from memopt.step.planner import StepPlan
from memopt.step.shared import SharedStep

PEAKS = GraphPeaks(forward=500, backward=800, saved=300, left=100)
CALLS = [Ran((Figures(PEAKS, PEAKS, base=1000, key="graph", program=None),), {})]


def session(limit):
    return SharedStep(parse_budget(limit), Resident())


def test_a_step_is_over_by_what_its_loop_holds_beyond_the_room_that_is_left():
    step = session(1850)
    assert step.excess_around(CALLS) == (0, 1850)
    step.seen = Seen(held=40, known=True)
    assert step.excess_around(CALLS) == (0, 1850)
    step.seen = Seen(held=70, known=True)
    assert step.excess_around(CALLS) == (20, 1850)


def test_what_a_step_of_its_own_has_judged_is_not_over_by_what_it_was_planned_with():
    step = session(1750)  # 50 bytes less than the plan: what an allocator might have lost, and was seen not to lose
    assert step.excess_around(CALLS) == (0, 1750)
    step.seen = Seen(held=30, known=True)
    assert step.excess_around(CALLS) == (30, 1750)
    step.expects_loss([])  # planned anew with that
    assert step.excess_around(CALLS) == (0, 1750)
    step.seen = dataclasses.replace(step.seen, forward=600)
    assert step.excess_around(CALLS) == (300, 1750)


def test_arguments_of_earlier_calls_are_over_beside_such_a_plan():
    step = session(1750)
    step.inputs_beside = 10
    assert step.excess_around(CALLS) == (10, 1750)


def test_what_a_loop_holds_lies_beside_a_cuda_graph():
    step = session(3000)
    step.seen = Seen(between=600, known=True)
    step.capture_reserve.beside = 600
    assert step.excess_around(CALLS) == (0, 3000)
    step.seen = Seen(between=700, known=True)
    assert step.excess_around(CALLS) == (100, 3000)
    step.capture_reserve.beside = None  # it is not captured: the step has room for that where its graphs do not run
    assert step.excess_around(CALLS) == (0, 3000)


def test_the_optimizers_step_lies_beside_a_cuda_graph():
    optimizer = OptimizerFootprint(state_bytes=0, existing_state_bytes=0, step_peak_bytes=50)
    step = SharedStep(parse_budget(3000), Resident(optimizer=optimizer))
    step.capture_reserve.beside = 20
    assert step.excess_around(CALLS) == (30, 3000)


def test_the_next_batch_lies_beside_a_cuda_graph():
    step = SharedStep(parse_budget(3000), Resident(inputs=50))  # while the one before is still held
    step.capture_reserve.beside = 20
    assert step.excess_around(CALLS) == (30, 3000)


def test_a_call_beside_others_of_its_step_knows_them_until_it_ends():
    step = session(3000)
    step.begins_beside(CALLS, [], 10, can_drop=True)
    assert (step.earlier, step.beside_calls, step.inputs_beside, step.has_other_ways) == (CALLS, [], 10, True)
    step.runs(CALLS[0].graphs[0])
    step.ends_beside()
    assert (step.earlier, step.beside_calls, step.has_other_ways) == ([], [], False)
    assert step.ran == [CALLS[0].graphs[0]], "it is noted behind the call's end"
    step.begins_beside([], [], 0, can_drop=True)
    assert step.ran == [] and not step.has_other_ways
    step.last_word = True
    step.begins_beside([], CALLS, 0, can_drop=True)
    assert step.beside_calls == CALLS and not step.has_other_ways


def lowered(by):
    """A step that was planned within a fraction, which is of so many bytes less since."""
    step = session(0.5)
    step.reference.trains(3700, "step")
    planned = Step(("graph",), (), StepPlan((), 800, 800, True), 800, 1000, step.limit(0), 3700)
    step.step = planned
    step.reference.training -= by
    return step


def test_a_plan_is_over_a_fraction_that_turns_out_to_be_of_less():
    assert lowered(0).excess_around(CALLS) == (0, 1850)
    assert lowered(100).excess_around(CALLS) == (0, 1800)
    assert lowered(800).excess_around(CALLS) == (350, 1450)
    assert lowered(200).excess_around(CALLS) == (0, 1750)  # by no more than a loop's scalars


def test_what_a_step_of_its_own_has_judged_is_over_a_lower_fraction_by_what_that_fell():
    step = session(0.5)
    step.reference.trains(3500, "step")  # 50 bytes less than the plan
    step.step = Step(("graph",), (), StepPlan((), 800, 800, True), 800, 1000, step.limit(0), 3500)
    assert step.excess_around(CALLS) == (0, 1750)
    step.reference.training -= 800
    assert step.excess_around(CALLS) == (400, 1350)
