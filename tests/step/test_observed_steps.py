"""Which steps of a loop are observed."""

from memopt.step.observed_steps import FIRST_STEPS, Looking, is_observed


def test_the_first_steps_and_then_ever_fewer():
    observed = [step for step in range(1, 100) if is_observed(step)]
    assert observed[:FIRST_STEPS] == list(range(1, FIRST_STEPS + 1))
    assert observed[FIRST_STEPS:] == [8, 16, 32, 64]


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def observed(looking, clock, *, step_seconds, look_seconds, steps=130):
    found = []
    for step in range(1, steps):
        if looking.is_due(step):
            found.append(step)
            for _ in range(2):  # a look has parts
                with looking.looks():
                    clock.seconds += look_seconds / 2
        clock.seconds += step_seconds
    return found


def test_slow_steps_are_observed_as_often_as_may_be():
    clock = Clock()
    assert observed(Looking(clock), clock, step_seconds=1.0, look_seconds=0.1) == [1, 2, 3, 4, 8, 16, 32, 64, 128]


def test_looks_that_take_long_are_a_small_part_of_the_loop():
    clock = Clock()
    assert observed(Looking(clock), clock, step_seconds=0.01, look_seconds=0.025) == [1, 2, 3, 4, 64, 128]


def test_looks_that_take_no_time_are_not_waited_for():
    clock = Clock()
    assert observed(Looking(clock), clock, step_seconds=0.0, look_seconds=0.0) == [1, 2, 3, 4, 8, 16, 32, 64, 128]


def test_a_look_that_fails_has_taken_time():
    clock = Clock()
    looking = Looking(clock)
    assert looking.is_due(1)
    try:
        with looking.looks():
            clock.seconds += 1
            raise ValueError
    except ValueError:
        assert not looking.is_due(8)
