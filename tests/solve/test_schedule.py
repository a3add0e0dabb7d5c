"""Live bytes, seconds and what is saved, against numbers counted by hand."""

import dataclasses

import pytest

from memopt.solve.problem import StepProblem
from memopt.solve.schedule import Schedule, ScheduleError, simulate
from tests.solve.hand import KEEP_ALL, REMAKE_A, STEP, A, B, X
from tests.solve.problems import chain


def test_a_chain_that_keeps_everything():
    trace = simulate(STEP, Schedule(KEEP_ALL, 2))
    # A; A + B + workspace; A + B + T + G; A + T + G + H. X is resident: its 1000 bytes never count.
    assert trace.live_bytes == (10, 33, 39, 26)
    assert (trace.peak_bytes, trace.peak_step) == (39, 2)
    assert trace.seconds == 15.0
    assert trace.saved == (A, B)


def test_a_chain_that_recomputes_its_first_layer():
    trace = simulate(STEP, Schedule(REMAKE_A, 2))
    # A; A + B + workspace; B + T + G; A + T + G; A + T + G + H.
    assert trace.live_bytes == (10, 33, 29, 19, 26)
    assert (trace.peak_bytes, trace.peak_step) == (33, 1)
    assert trace.seconds == 16.0
    assert trace.saved == (B,)


def test_a_copy_that_nobody_reads_lives_for_one_step():
    unread = dataclasses.replace(STEP, reads=((X,), (X,), (A,), (A,)))
    assert simulate(unread, Schedule(KEEP_ALL, 2)).live_bytes == (10, 33, 19, 21)


def test_the_first_copy_of_a_pinned_storage_stays_and_later_ones_do_not():
    pinned = dataclasses.replace(STEP, pinned=frozenset({A}))
    # At step 3 both copies of A are there: the caller holds the first. H is no longer pinned, but nothing comes after.
    assert simulate(pinned, Schedule(REMAKE_A, 2)).live_bytes == (10, 33, 39, 29, 36)
    assert simulate(pinned, Schedule(KEEP_ALL, 2)).live_bytes == (10, 33, 39, 26)
    # A read binds to the latest copy: the second lives from step 2 to 4.
    assert simulate(pinned, Schedule((0, 1, 0, 2, 3), 2)).live_bytes == (10, 33, 44, 49, 36)


def test_what_arrives_counts_from_the_start_of_backward_to_the_end():
    never = dataclasses.replace(STEP, reads=((X,), (A,), (B,), (A, 4)), forward=4)
    assert simulate(never, Schedule(KEEP_ALL, 4)).live_bytes == (10, 33, 35, 22)
    always = dataclasses.replace(never, forward=0)
    assert simulate(always, Schedule(KEEP_ALL, 0)).live_bytes == (14, 37, 39, 26)


def test_an_operation_with_several_outputs_makes_all_of_them_again():
    problem = StepProblem(
        sizes=(2, 3, 4, 5),
        reads=((), (0,), (1, 2)),
        writes=((0, 1), (2,), (3,)),
        costs=(1.0,) * 3,
        workspace=(0,) * 3,
        forward=2,
        recomputable=(True,) * 3,
    )
    assert simulate(problem, Schedule((0, 1, 2), 2)).live_bytes == (5, 9, 12)
    again = simulate(problem, Schedule((0, 1, 0, 2), 2))
    assert again.live_bytes == (5, 6, 9, 12)
    assert again.saved == (2,)


def test_a_chain_without_recomputation_peaks_where_backward_starts():
    trace = simulate(chain(4, 10), Schedule(tuple(range(8)), 4))
    assert trace.live_bytes == (10, 20, 30, 40, 50, 50, 40, 30)
    assert trace.peak_step == 4  # the first of two
    assert trace.saved == (1, 2, 3, 4)


def test_a_step_without_operations_takes_nothing():
    trace = simulate(StepProblem((7,), (), (), (), (), 0, ()), Schedule((), 0))
    assert dataclasses.astuple(trace) == (0, -1, (), 0.0, ())


def test_a_read_before_its_write_is_refused():
    with pytest.raises(ScheduleError, match=r"step 1 \(operation 2\) reads storage 2 before it is written"):
        simulate(STEP, Schedule((0, 2, 1, 3), 1))
    with pytest.raises(ScheduleError, match=r"step 1 \(operation 2\) reads storage 3 before it is written"):
        simulate(dataclasses.replace(STEP, reads=((X,), (A,), (3,), (A,))), Schedule((0, 2, 1, 3), 3))


def test_bytes_beyond_32_bits_are_exact():
    assert simulate(chain(4, (1 << 40) + 1), Schedule(tuple(range(8)), 4)).peak_bytes == 5 * ((1 << 40) + 1)
