"""The floor of a step in which results take the place of what they are made of."""

from __future__ import annotations

import dataclasses

import pytest

from memopt.solve.in_place import in_place_floor, shared
from memopt.solve.problem import StepProblem
from memopt.solve.recompute import curve
from memopt.solve.schedule import simulate

# wide = first(x); value = act(wide); out = second(value); then backward, whose activation lies in its gradient.
X, WEIGHTS, WIDE, VALUE, OUT, GRADIENT, OF_VALUE, OF_SECOND, OF_WIDE, OF_FIRST = range(10)
PERCEPTRON = StepProblem(
    sizes=(1, 2, 8, 8, 1, 1, 8, 2, 8, 2),
    reads=(
        (X, WEIGHTS),
        (WIDE,),
        (VALUE, WEIGHTS),
        (),
        (GRADIENT, WEIGHTS),
        (GRADIENT, VALUE),
        (OF_VALUE, WIDE),
        (OF_WIDE, X),
    ),
    writes=((WIDE,), (VALUE,), (OUT,), (GRADIENT,), (OF_VALUE,), (OF_SECOND,), (OF_WIDE,), (OF_FIRST,)),
    costs=(1.0, 0.1, 1.0, 0.0, 1.0, 1.0, 0.1, 1.0),
    workspace=(0,) * 8,
    forward=3,
    recomputable=(True, True, True, False, True, True, True, True),
    pinned=frozenset({OUT, GRADIENT, OF_SECOND, OF_FIRST}),
    resident=frozenset({X, WEIGHTS}),
)
OVER = ((OF_WIDE, OF_VALUE),)


def test_of_plans_that_are_equal_where_all_is_counted_the_one_that_shares_memory_is_found() -> None:
    """Where autograd holds the gradient to the end, the search saw no use in making the first product again."""
    assert curve(PERCEPTRON, seconds=2).minimum_bytes == 28
    found = in_place_floor(PERCEPTRON, OVER, seconds=2)
    assert found is not None and found.peak_bytes == simulate(PERCEPTRON, found.schedule).peak_bytes == 28
    together = shared(PERCEPTRON, OVER)
    assert simulate(together, found.schedule).peak_bytes == 20
    assert curve(together, seconds=2).minimum_bytes == 20
    assert found.extra_seconds == pytest.approx(found.seconds - PERCEPTRON.base_seconds)


def test_nothing_is_looked_for_where_nothing_can_be_shared() -> None:
    assert in_place_floor(PERCEPTRON, ()) is None


def test_results_in_a_row_share_one_memory_and_what_is_held_stays_held() -> None:
    chain = StepProblem(
        sizes=(4, 4, 4, 4),
        reads=((), (0,), (1,), (2,)),
        writes=((0,), (1,), (2,), (3,)),
        costs=(1.0,) * 4,
        workspace=(0,) * 4,
        forward=0,
        recomputable=(True,) * 4,
        pinned=frozenset({3}),
    )
    one = shared(chain, ((2, 1), (3, 2), (1, 0)))
    assert one.writes == ((0,), (), (), ()) and one.reads == ((), (0,), (0,), (0,))
    assert one.pinned == {0} and not any(one.recomputable)
    assert dataclasses.replace(one, pinned=chain.pinned, reads=chain.reads, writes=chain.writes).sizes == chain.sizes
