"""What the phases of a step take: by hand, and in all against what a simulation counts."""

from hypothesis import given

from memopt.solve.phase_peaks import PhasePeaks, phase_peaks
from memopt.solve.recompute import curve
from memopt.solve.schedule import Schedule, simulate
from tests.solve.check_overwrite import overwritten
from tests.solve.problems import step_problems
from tests.solve.test_check_overwrite import MAY, PLAIN, A, D, problem


def test_each_phase_has_its_peak_and_what_is_saved_lies_between_them():
    # Forward ends with A, B and C, which backward reads B and C of; D is made beside both, and beside T.
    assert phase_peaks(problem(3), Schedule(PLAIN, 3)) == PhasePeaks(forward=24, backward=32, saved=16)


def test_kernels_write_over_what_they_read_last():
    # C takes the place of A.
    assert phase_peaks(problem(3), Schedule(PLAIN, 3), MAY) == PhasePeaks(forward=16, backward=32, saved=16)


def test_what_the_caller_holds_is_there_between_the_phases():
    assert phase_peaks(problem(3, pinned=(A, D)), Schedule(PLAIN, 3)).saved == 24


@given(step_problems())
def test_the_larger_graph_has_the_step_s_peak(case):
    for point in curve(case, seconds=0.2).points:
        phases = phase_peaks(case, point.schedule)
        assert max(phases.forward, phases.backward) == point.peak_bytes
        kernels = (True,) * len(case.costs)
        spared = overwritten(case, point.schedule, kernels)
        live = simulate(case, point.schedule).live_bytes
        most = max((taken - less for taken, less in zip(live, spared, strict=True)), default=0)
        written_over = phase_peaks(case, point.schedule, kernels)
        assert max(written_over.forward, written_over.backward) == most
        assert written_over.saved == phases.saved
