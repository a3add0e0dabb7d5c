"""Bytes alive at each step, beside a sum over all things at every step."""

import random

import numpy as np
import pytest

from memopt.solve.liveness import profile


def counted(steps, spans):
    return [sum(size for born, gone, size in spans if born <= step < gone) for step in range(steps)]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_sum_of_what_lives_at_each_step(seed):
    made = random.Random(seed)
    steps = made.randrange(1, 12)
    begins = [made.randrange(steps + 2) for _ in range(made.randrange(15))]
    spans = [(born, born + made.randrange(steps + 2), made.randrange(2**40)) for born in begins]
    assert profile(steps, spans).tolist() == counted(steps, spans)
    assert profile(steps, np.array(spans, dtype=np.int64)).tolist() == counted(steps, spans)


def test_what_is_let_go_of_behind_the_last_step_stays():
    assert profile(3, [(0, 2, 10), (1, 99, 5)]).tolist() == [10, 15, 5]


def test_what_begins_behind_the_last_step_counts_nowhere():
    assert profile(2, [(2, 3, 10), (5, 9, 5)]).tolist() == [0, 0]


def test_nothing_lives_where_there_is_nothing():
    assert profile(2, []).tolist() == [0, 0] and profile(0, [(0, 1, 10)]).tolist() == []


def test_bytes_are_counted_exactly():
    large = 2**53 + 1
    assert profile(1, [(0, 1, large), (0, 1, 2)]).tolist() == [large + 2]
