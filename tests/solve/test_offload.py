"""Which values wait on the host: what is chosen runs without waiting, and nothing more would."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.solve.offload import Offload, Trip, Value, trips
from tests.solve.check_offload import check

# Ten operations of a second each way; the link takes a second for each 10 bytes.
LINE = Offload((1.0,) * 10, (1.0,) * 10, tuple(range(11)), tuple(range(11)), 10, 10, (), 1000)


def problem(*values, **changes):
    return dataclasses.replace(LINE, values=values, **changes)


def test_a_value_leaves_when_it_is_made_and_comes_back_as_late_as_it_can():
    assert trips(problem(Value(20, 1, 1, 9)), margin=1) == [Trip(0, 2, 4, 7)]
    assert trips(problem(Value(20, 1, 1, 9)), margin=1.5) == [Trip(0, 2, 5, 6)]


def test_its_memory_is_free_when_forward_has_read_it():
    assert trips(problem(Value(20, 1, 6, 9)), margin=1) == [Trip(0, 2, 7, 7)]


def test_one_copy_at_a_time():
    found = trips(problem(Value(20, 0, 0, 9), Value(20, 0, 0, 9), Value(20, 3, 3, 4)), margin=1)
    assert found == [Trip(0, 1, 3, 5), Trip(1, 1, 5, 7), Trip(2, 4, 7, 2)]


def test_copies_begin_at_given_places_only():
    found = trips(problem(Value(20, 1, 1, 9), leaving=(0, 3, 8), coming=(2, 6, 9)), margin=1)
    assert found == [Trip(0, 3, 8, 6)]


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ([Value(20, 8, 8, 9)], {}),  # forward is over before the copy is
        ([Value(20, 1, 1, 1)], {}),  # backward needs it too soon
        ([Value(20, 1, 1, 9)], {"limit": 19}),
        ([Value(20, 1, 1, 9)], {"leaving": (0, 1)}),
        ([Value(20, 1, 1, 9)], {"coming": (8, 9)}),
        ([Value(20, 1, 10, 9)], {}),
    ],
)
def test_what_cannot_wait_stays(values, changes):
    assert trips(problem(*values, **changes), margin=1) == []


def test_another_goes_where_one_cannot():
    found = trips(problem(Value(990, 0, 0, 9), Value(20, 1, 1, 9), Value(20, 1, 1, 9), limit=39), margin=1)
    assert [trip.value for trip in found] == [1]


@st.composite
def problems(draw):
    phases = [draw(st.lists(st.integers(0, 8).map(float), min_size=1, max_size=12)) for _ in range(2)]
    places = [sorted(draw(st.sets(st.integers(0, len(phase))))) for phase in phases]
    values = []
    for _ in range(draw(st.integers(0, 6))):
        made = draw(st.integers(0, len(phases[0]) - 1))
        last = draw(st.integers(made, len(phases[0]) - 1))
        values.append(Value(draw(st.integers(1, 40)), made, last, draw(st.sampled_from(places[1] or [0]))))
    speeds = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    return Offload(*phases, *places, *speeds, tuple(values), draw(st.integers(0, 200)))


@settings(max_examples=400)
@given(problems(), st.sampled_from([1.0, 1.3, 2.0]))
def test_what_is_chosen_runs_without_waiting(problem, margin):
    found = trips(problem, margin)
    check(problem, found)
    assert [trip.leaves for trip in found] == sorted(trip.leaves for trip in found)


def most(problem):
    """How many values can land where all are as large and come back at once: every set of them is tried."""
    begins, end = [0.0, *itertools.accumulate(problem.forward)], problem.leaving[-1] if problem.leaving else -1

    def lands(values):
        done = 0.0
        for value in values:
            leaves = next((place for place in problem.leaving if place > value.made), None)
            if leaves is None or max(value.last, leaves) >= end:
                return False
            done = max(done, begins[leaves]) + value.size / problem.to_host
        return not values or done <= begins[end]

    order = sorted(problem.values, key=lambda value: value.made)
    return max(n for n in range(len(order) + 1) if any(map(lands, itertools.combinations(order, n))))


@settings(max_examples=100)
@given(problems())
def test_of_values_as_large_as_one_another_as_many_go_as_can(problem):
    values = tuple(dataclasses.replace(value, size=8, needed=1) for value in problem.values)
    back = {"backward": (1.0,), "coming": (0, 1), "from_host": 1e6, "limit": 1000}
    problem = dataclasses.replace(problem, values=values, **back)
    assert len(trips(problem, 1.0)) == most(problem)


RIGHT = [Trip(0, 2, 4, 7)]


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([Trip(0, 1, 4, 7)], "not there when"),
        ([Trip(0, 2, 3, 7)], "not landed"),
        ([Trip(0, 2, 4, 8)], "not back"),
        ([Trip(0, 2, 4, 9)], "not there when"),
        ([Trip(0, 2, 4, 7), Trip(0, 4, 6, 5)], "waits twice"),
        ([Trip(0, 2, 4, 11)], "where nothing may begin"),
    ],
)
def test_the_checker_refuses_what_is_wrong(chosen, message):
    line = problem(Value(20, 1, 1, 9))
    check(line, RIGHT)
    with pytest.raises(ValueError, match=message):
        check(line, chosen)
