"""The judge of orders: what it accepts, and each claim that it finds to be wrong."""

import dataclasses

import pytest

from memopt.solve.order import Order, OrderError, OrderProblem
from tests.solve.check_order import check_order

# 0 makes a (8 bytes), 1 makes b (2) of a, 2 makes c (4) of a, 3 reads b and c.
DIAMOND = OrderProblem(
    sizes=(8, 2, 4), touches=((0,), (0, 1), (0, 2), (1, 2)), after=((), (0,), (0,), (1, 2)), workspace=(0, 1, 0, 3)
)
FOUND = Order(steps=(0, 1, 2, 3), peak_bytes=14, lower_bound=14)


def test_it_counts_what_is_alive_and_what_an_operation_needs_beside_it():
    check_order(DIAMOND, FOUND)
    check_order(DIAMOND, dataclasses.replace(FOUND, steps=(0, 2, 1, 3), peak_bytes=15))


def test_pinned_storages_stay_to_the_end():
    check_order(dataclasses.replace(DIAMOND, pinned=frozenset({0})), dataclasses.replace(FOUND, peak_bytes=17))


def test_a_result_may_take_over_what_dies_in_the_same_step():
    chain = OrderProblem(sizes=(8, 8), touches=((0,), (0, 1)), after=((), (0,)), workspace=(0, 0), takes=(-1, 0))
    check_order(chain, Order((0, 1), 8, 0))
    smaller = dataclasses.replace(chain, sizes=(8, 4))
    check_order(smaller, Order((0, 1), 12, 0))
    held = dataclasses.replace(chain, pinned=frozenset({0}))
    check_order(held, Order((0, 1), 16, 0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": (0, 1, 2)}, "no permutation of 4"),
        ({"steps": (0, 1, 1, 3)}, "no permutation of 4"),
        ({"steps": (1, 0, 2, 3)}, "operation 1 runs before operation 0"),
        ({"peak_bytes": 13}, "the peak is 14 bytes, not 13"),
        ({"lower_bound": 15}, "a lower bound of 15 bytes is above the peak of 14"),
    ],
)
def test_what_is_claimed_wrongly_is_named(change, words):
    with pytest.raises(OrderError, match=words):
        check_order(DIAMOND, dataclasses.replace(FOUND, **change))
