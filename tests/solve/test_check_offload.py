"""The judge of what waits on the host: each way of being wrong is named."""

import dataclasses

import pytest

from memopt.solve.offload import Offload, Trip, Value
from tests.solve.check_offload import check

# A second each; 10 bytes a second each way: the value's 20 bytes take two.
PROBLEM = Offload([1.0] * 6, [1.0] * 6, range(7), range(7), 10.0, 10.0, [Value(20, 0, 1, 4)], 20)
TRIP = Trip(value=0, leaves=1, landed=3, returns=2)


def test_a_trip_that_is_in_time_is_accepted():
    check(PROBLEM, [TRIP])


@pytest.mark.parametrize(
    ("trip", "message"),
    [
        ({"leaves": 0}, "not there when it is read or sent"),
        ({"landed": 1}, "not there when it is read or sent"),
        ({"landed": 2}, "has not landed"),
        ({"returns": 3}, "is not back"),
        ({"returns": 5}, "not there when it is read or sent"),
        ({"leaves": 7}, "where nothing may begin"),
    ],
)
def test_a_trip_at_the_wrong_time_is_refused(trip, message):
    with pytest.raises(ValueError, match=message):
        check(PROBLEM, [dataclasses.replace(TRIP, **trip)])


def test_more_than_may_wait_is_refused():
    with pytest.raises(ValueError, match="more waits than may"):
        check(dataclasses.replace(PROBLEM, limit=19), [TRIP])
    with pytest.raises(ValueError, match="waits twice"):
        check(PROBLEM, [TRIP, TRIP])


def test_one_link_carries_one_value_at_a_time():
    two = dataclasses.replace(PROBLEM, values=[*PROBLEM.values, Value(20, 0, 1, 6)], limit=40)
    later = Trip(value=1, leaves=1, landed=5, returns=4)
    check(two, [TRIP, later])
    with pytest.raises(ValueError, match="value 1 has not landed"):
        check(two, [TRIP, dataclasses.replace(later, landed=3)])
