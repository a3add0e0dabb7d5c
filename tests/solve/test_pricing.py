"""Rising prices: what is worth saving shrinks step by step, from everything to what costs nothing to keep."""

import dataclasses

from hypothesis import given, settings

from memopt.solve.pricing import ascend, ladder
from memopt.solve.problem import StepProblem
from tests.solve.judged import JudgedSearch, covers, front
from tests.solve.problems import chain, step_problems


def _saved(search):
    return [[s for s in range(1, search.problem.forward + 1) if state.saved[s]] for state in search.played]


def _branches(count: int) -> StepProblem:
    """Return a step whose layers are each made from the input alone, so that none is needed for another."""
    problem = chain(count, 8)
    return dataclasses.replace(problem, reads=((0,),) * count + problem.reads[count:])


def test_a_ladder_without_lateness_prices_every_byte_alike():
    search = JudgedSearch(chain(4, 8))
    ladder(search, 0.0, growth=1.5)
    # A byte costs as much as making it again, for all layers at the same price.
    assert _saved(search) == [[1, 2, 3, 4], []]


def test_a_ladder_with_lateness_gives_up_early_layers_first():
    search = JudgedSearch(_branches(4))
    ladder(search, 1.0, growth=1.1)
    # Layer 4 is needed at once: its bytes are free. Layer 1 is needed last.
    assert _saved(search) == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4]]
    peaks = [state.peak for state in search.played]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < peaks[0]


def test_a_chain_is_needed_as_a_whole_from_the_start():
    search = JudgedSearch(chain(4, 8))
    ladder(search, 1.0, growth=1.1)
    assert _saved(search) == [[1, 2, 3, 4]]  # to make layer 4 again is to make all: none can be saved late


def test_ascend_lowers_the_peak_where_it_is_high():
    search = JudgedSearch(_branches(8))
    ascend(search, search.fastest(), slack=0.2, growth=1.1)
    first, *_, last = _saved(search)
    assert first == [1, 2, 3, 4, 5, 6, 7, 8] and len(last) < 4
    peaks = [state.peak for state in search.played]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] < 0.5 * peaks[0]


def test_nothing_is_played_where_nothing_crosses_to_backward():
    apart = StepProblem((4, 4), ((), ()), ((0,), (1,)), (1.0, 1.0), (0, 0), 1, (True, True))
    for problem in (apart, StepProblem((), (), (), (), (), 0, ())):
        search = JudgedSearch(problem)
        ladder(search, 0.3, growth=1.3)
        assert search.played == []
    search = JudgedSearch(apart)
    ascend(search, search.fastest(), slack=0.2, growth=1.1)
    assert len(search.played) == 1


def test_a_late_search_tries_no_price():
    search = JudgedSearch(chain(4), operations=-1)
    ladder(search, 0.3, growth=1.3)
    assert search.played == []


@settings(max_examples=60)
@given(problem=step_problems())
def test_every_price_leads_to_a_right_schedule_and_none_is_lost(problem):
    search = JudgedSearch(problem)
    fastest = search.fastest()
    for lateness in (0.0, 0.3, 1.0):
        before = front(search)
        ladder(search, lateness, growth=1.5)
        assert covers(front(search), before)
    if fastest.peak and problem.forward < len(problem.reads):
        before = front(search)
        ascend(search, fastest, slack=0.2, growth=1.2)
        assert covers(front(search), before)
    assert search.archive.states[-1].seconds == problem.base_seconds
    assert covers(front(search), [(state.peak, state.seconds) for state in search.played])
