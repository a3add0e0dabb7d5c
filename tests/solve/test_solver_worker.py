"""What a process that searches gives back."""

from memopt.solve.phase_peaks import phase_peaks
from memopt.solve.recompute import curve
from memopt.solve.solver_worker import Job, searched
from tests.solve.problems import chain


def test_every_plan_comes_with_what_its_phases_take():
    problem = chain(6)
    kernels = (True,) * len(problem.costs)
    plain, (first, second) = curve(problem, seconds=1.0), searched([Job(problem, 1.0), Job(problem, 1.0, kernels)])
    assert first.points == second.points == plain.points and not plain.peaks
    assert first.peaks == tuple(phase_peaks(problem, point.schedule) for point in plain.points)
    assert second.peaks == tuple(phase_peaks(problem, point.schedule, kernels) for point in plain.points)
