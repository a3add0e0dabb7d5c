import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.report.svg import round_up


@pytest.mark.parametrize(("value", "step"), [(1, 1), (1.01, 2), (3, 5), (7, 10), (0.03, 0.05), (250, 500), (1e9, 1e9)])
def test_round_up(value, step):
    assert round_up(value) == pytest.approx(step)


@given(st.floats(1e-9, 1e15))
def test_is_one_two_or_five_and_not_far(value):
    step = round_up(value)
    assert value * (1 - 1e-6) <= step <= value * 2.5 * (1 + 1e-6)
    digits = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(digits - known) for known in (1, 2, 5, 10)) < 1e-6
