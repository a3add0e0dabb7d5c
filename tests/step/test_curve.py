import itertools
import random

import pytest

from memopt.step.curve import CurvePoint, monotone, step_curve


def test_plans_in_between_are_corrected_in_proportion():
    plans = [(100, 1.0), (80, 1.1), (60, 1.2), (40, 1.4)]
    curve = step_curve(plans, {0: 90, 2: 70}, 2)
    assert [point.bytes for point in curve] == [90, 80, 70]  # the last is not said to take less than any finished one
    assert [point.seconds for point in curve] == [1.0, 1.1, 1.2]
    assert [point.chosen for point in curve] == [False, False, True]
    assert curve[2].extra == pytest.approx(0.2)


def test_outside_of_what_is_finished_the_nearest_correction_holds():
    assert [point.bytes for point in step_curve([(100, 1.0), (50, 2.0)], {1: 55}, 1)] == [105, 55]


def test_the_chosen_plan_stays_in_place_of_a_better_one():
    points = [CurvePoint(10, 1.0, 0.0), CurvePoint(9, 1.5, 0.5), CurvePoint(9, 2.0, 1.0, chosen=True)]
    assert monotone(points) == (points[0], points[2])


def test_equal_plans_are_one_and_time_may_be_nothing():
    assert step_curve([(7, 0.0), (7, 0.0)], {0: 7, 1: 7}, 1) == (CurvePoint(7, 0.0, 0.0, chosen=True),)


@pytest.mark.parametrize("seed", range(50))
def test_always_monotone_with_the_chosen_plan_on_it(seed):
    draw = random.Random(seed)
    plans = [(draw.randint(1, 40), draw.randint(1, 20) / 4) for _ in range(draw.randint(1, 30))]
    finished = {index: draw.randint(1, 40) for index in draw.sample(range(len(plans)), draw.randint(1, len(plans)))}
    chosen = draw.choice(list(finished))
    curve = step_curve(plans, finished, chosen)
    for more, less in itertools.pairwise(curve):
        assert more.bytes > less.bytes
        assert more.seconds < less.seconds
    assert [(point.bytes, point.seconds) for point in curve if point.chosen] == [(finished[chosen], plans[chosen][1])]
