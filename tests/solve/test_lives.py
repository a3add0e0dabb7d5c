"""Bytes at each step of schedules, counted all at once, against a simulation step by step."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.solve.lives import Lives
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import curve
from memopt.solve.schedule import Schedule, ScheduleError, simulate
from tests.solve.check_overwrite import overwritten
from tests.solve.problems import step_problems


@given(step_problems(), st.integers(0, 99))
def test_bytes_and_what_is_saved_are_those_of_a_simulation(case, seed):
    may = [random.Random(seed + operation).random() < 0.7 for operation in range(len(case.reads))]
    lives = Lives(case, may)
    plain = Schedule(tuple(range(len(case.reads))), case.forward)
    for schedule in (plain, *(point.schedule for point in curve(case, seconds=0.2).points)):
        found, trace = lives.of(schedule), simulate(case, schedule)
        assert (tuple(found.live.tolist()), tuple(found.saved.tolist())) == (trace.live_bytes, trace.saved)
        assert tuple(found.spared.tolist()) == overwritten(case, schedule, may)
        assert not Lives(case).of(schedule).spared.any()


def test_a_read_before_the_write_is_refused_as_by_a_simulation():
    case = StepProblem((8, 8), ((), (0,)), ((0,), (1,)), (1.0, 1.0), (0, 0), 1, (True, True))
    assert Lives(case).of(Schedule((0, 1), 1)).live.tolist() == [8, 16]
    with pytest.raises(ScheduleError, match="reads storage 0 before"):
        Lives(case).of(Schedule((1, 0), 1))
    assert Lives(case).of(Schedule((), 0)).live.tolist() == []
