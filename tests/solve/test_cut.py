"""The cut saves what trying every choice would save: least price of what is saved plus cost of what is recomputed."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memopt.solve.cut import SavingCut
from memopt.solve.rollout import Rollout
from tests.solve.hand import STEP, A, B
from tests.solve.problems import chain, step_problems


def _price(problem, fixed, needed, saved, prices):
    """Return Σ price of `saved` + Σ cost of all operations that must run again."""
    again, stack = set(), [storage for storage in needed if storage not in saved]
    while stack:
        operation = problem.producer[stack.pop()]
        if operation not in again:
            again.add(operation)
            stack += [read for read in problem.reads[operation] if not fixed[read] and read not in saved]
    return sum(prices[storage] for storage in saved) + sum(problem.costs[operation] for operation in again)


@pytest.mark.parametrize(
    ("prices", "saved"),
    [
        ({A: 0.5, B: 1.5}, {A, B}),
        ({A: 0.5, B: 2.5}, {A}),  # making B again costs 2.0
        ({A: 1.5, B: 1.5}, {B}),  # making A again costs 1.0
        ({A: 1.5, B: 2.5}, set()),
        ({A: 1.5, B: 3.5}, set()),  # A is recomputed anyway
        ({A: 0.0, B: 0.0}, {A, B}),
    ],
)
def test_by_hand(prices, saved):
    cut = SavingCut(Rollout(STEP))
    assert cut.needed == {A, B}
    chosen = cut.solve([prices.get(storage, 0.0) for storage in range(6)])
    assert {storage for storage, wanted in enumerate(chosen) if wanted} == saved


def test_what_saves_most_may_be_something_backward_does_not_read():
    # Backward needs only the ends of both branches of a fork; the fork is dear to make and cheap to keep.
    problem = chain(4)
    reads = ((0,), (1,), (1,), (2, 3), (2,), (3, 5), (6,), (7,))
    fork = type(problem)(**{**vars(problem), "reads": reads, "costs": (9.0, 1.0, 1.0, 1.0) + (1.0,) * 4})
    chosen = SavingCut(Rollout(fork)).solve([0.0, 1.5, 3.0, 3.0, 3.0] + [3.0] * 4)
    assert [storage for storage, wanted in enumerate(chosen) if wanted] == [1]


@settings(max_examples=120)
@given(data=st.data(), problem=step_problems(operations=10))
def test_it_is_as_cheap_as_the_best_of_all_choices_at_the_highest_prices_so_far(data, problem):
    rollout = Rollout(problem)
    cut, fixed = SavingCut(rollout), rollout.fixed
    movable = [s for s, maker in enumerate(problem.producer) if 0 <= maker < problem.forward and not fixed[s]]
    assume(cut.needed and len(movable) <= 8)
    choices = [set(some) for count in range(len(movable) + 1) for some in itertools.combinations(movable, count)]
    prices = [0.0] * len(problem.sizes)
    for _ in range(4):
        asked = [data.draw(st.sampled_from((0.0, 0.25, 1.0, 2.5, 6.0))) for _ in prices]
        prices = [max(pair) for pair in zip(prices, asked, strict=True)]
        chosen = {storage for storage, wanted in enumerate(cut.solve(asked)) if wanted}
        assert chosen <= set(movable)
        least = min(_price(problem, fixed, cut.needed, choice, prices) for choice in choices)
        assert _price(problem, fixed, cut.needed, chosen, prices) == pytest.approx(least, abs=1e-6)
