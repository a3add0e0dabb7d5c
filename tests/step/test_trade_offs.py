"""What is searched for the graphs of a step."""

from memopt.solve.solver_worker import searched
from memopt.step.encode_step import lower
from memopt.step.trade_offs import jobs_of, peaks_on
from tests.step.test_planner import costs_of, program


def test_graphs_share_the_time_by_their_operations_and_are_searched_beside_each_other():
    small, large = (lower(item, costs_of(item)) for item in (program(1), program(4)))
    (alone,) = jobs_of([small], 3.0)
    assert not alone.beside and alone.seconds == 3.0
    jobs = jobs_of([small, large], 3.0)
    assert all(job.beside for job in jobs) and sum(job.seconds for job in jobs) == 3.0
    assert jobs[0].seconds * len(large.operations) == jobs[1].seconds * len(small.operations)


def test_peaks_of_a_curve_are_those_that_it_was_searched_with():
    lowering = lower(program(2), costs_of(program(2)))
    (found,) = searched(jobs_of([lowering], 0.5))
    assert peaks_on(found, lowering) is found.peaks
