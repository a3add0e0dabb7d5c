"""What is written over what is read last: by hand, and counted anew from what a schedule reads later."""

import random

from hypothesis import given
from hypothesis import strategies as st

from memopt.solve.problem import StepProblem
from memopt.solve.recompute import curve
from memopt.solve.schedule import Schedule, simulate
from tests.solve.check_overwrite import overwritten
from tests.solve.problems import step_problems

# X is there, T arrives; A, B, C and D are of one size, E is larger; D is held to the end. B's operation may not.
X, T, A, B, C, D, E = range(7)
MAY = (True, False, True, True, True)
PLAIN = (0, 1, 2, 3, 4)


def problem(forward, pinned=(D,)):
    return StepProblem(
        sizes=(8, 8, 8, 8, 8, 8, 9),
        reads=((X,), (A,), (A, B), (B, C, T) if forward < 4 else (B, C), (D,)),
        writes=((A,), (B,), (C,), (D,), (E,)),
        costs=(1.0,) * 5,
        workspace=(0,) * 5,
        forward=forward,
        recomputable=(True,) * 5,
        pinned=frozenset(pinned),
        resident=frozenset({X}),
        arriving=frozenset({T}),
    )


def test_a_result_takes_the_place_of_one_copy_of_its_size_that_dies():
    # A is read again after B is made, and dies where C is; B and C die where D is made; D is too small for E.
    assert overwritten(problem(4), Schedule(PLAIN, 4), MAY) == (0, 0, 8, 8, 0)
    assert overwritten(problem(4), Schedule(PLAIN, 4), (True, False, True, False, True)) == (0, 0, 8, 0, 0)
    assert overwritten(problem(4, pinned=(A, B, C)), Schedule(PLAIN, 4), MAY) == (0, 0, 0, 0, 0)


def test_what_two_parts_of_one_kernel_may_read_keeps_its_place():
    every = overwritten(problem(4), Schedule(PLAIN, 4), (True,) * 5)
    assert every == (0, 0, 0, 8, 0), "A was read for B in the same kernel, and B for C, but C was not read before"


def test_what_waits_for_backward_keeps_its_place():
    assert overwritten(problem(3), Schedule(PLAIN, 3), MAY) == (0, 0, 8, 0, 0)


def test_a_copy_that_is_made_again_dies_where_it_was_read_before():
    schedule = Schedule((0, 1, 2, 0, 1, 3, 4), 3)
    assert overwritten(problem(3), schedule, MAY) == (0, 0, 8, 0, 0, 8, 0)


@given(step_problems(operations=10), st.integers(0, 99))
def test_never_more_than_what_dies_and_what_is_made(step, seed):
    schedule = curve(step, seconds=0.05).points[-1].schedule
    may = [random.Random(seed + operation).random() < 0.7 for operation in range(len(step.reads))]
    spared = overwritten(step, schedule, may)
    steps, sizes = schedule.steps, step.sizes
    for at, operation in enumerate(steps):
        made = step.writes[operation]
        dying = [
            storage
            for storage in step.reads[operation]
            if storage not in step.pinned | step.resident | step.arriving
            and not _read_later(step, steps, at, storage)
            and not _waited(step, steps, at, storage)
            and not _read_nearby(step, steps, at, storage, may)
        ]
        most = sum(sizes[s] for s in made if sizes[s] in {sizes[d] for d in dying}) if may[operation] else 0
        assert 0 <= spared[at] <= min(most, sum(sizes[s] for s in dying))
        assert not made or (spared[at] > 0) == (most > 0)
    live = simulate(step, schedule).live_bytes
    assert all(taken >= less for taken, less in zip(live, spared, strict=True))


def _read_later(step, steps, at, storage):
    for later in steps[at + 1 :]:
        if storage in step.reads[later]:
            return True
        if storage in step.writes[later]:
            return False
    return False


def _read_nearby(step, steps, at, storage, may):
    for before in reversed(steps[:at]):
        if not may[before] or storage in step.writes[before]:
            return False
        if storage in step.reads[before]:
            return True
    return False


def _waited(step, steps, at, storage):
    made = max((before for before in range(at) if storage in step.writes[steps[before]]), default=-1)
    return made < step.forward <= at
