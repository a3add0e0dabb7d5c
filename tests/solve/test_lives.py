"""Bytes at each step of schedules, counted all at once, against a simulation step by step."""

import pytest
from hypothesis import given

from memopt.solve.lives import Lives
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import curve
from memopt.solve.schedule import Schedule, ScheduleError, simulate
from tests.solve.problems import step_problems


@given(step_problems())
def test_bytes_and_what_is_saved_are_those_of_a_simulation(case):
    lives = Lives(case)
    plain = Schedule(tuple(range(len(case.reads))), case.forward)
    for schedule in (plain, *(point.schedule for point in curve(case, seconds=0.2).points)):
        live, saved = lives.of(schedule)
        trace = simulate(case, schedule)
        assert (tuple(live.tolist()), tuple(saved.tolist())) == (trace.live_bytes, trace.saved)


def test_a_read_before_the_write_is_refused_as_by_a_simulation():
    case = StepProblem((8, 8), ((), (0,)), ((0,), (1,)), (1.0, 1.0), (0, 0), 1, (True, True))
    assert Lives(case).of(Schedule((0, 1), 1))[0].tolist() == [8, 16]
    with pytest.raises(ScheduleError, match="reads storage 0 before"):
        Lives(case).of(Schedule((1, 0), 1))
    assert Lives(case).of(Schedule((), 0))[0].tolist() == []
