"""Two calls of a model side by side: what is a difference, and what is rounding."""

import pytest
import torch

from memopt.calls.compared import Outcome, difference_of, same_numbers, unlike

STATE = [torch.zeros(3, dtype=torch.uint8)]


def outcome(random=STATE, **values):
    return Outcome({}, frozenset(), values, random)


def test_rounding_is_no_difference_and_more_is_one():
    value = torch.linspace(-1, 1, 64)
    near, far = value * (1 + 1e-7), value * (1 + 1e-2)
    assert difference_of(outcome(y=value), outcome(y=near), None) is None
    assert "y differs by 0.01 (its largest value is 1)" in difference_of(outcome(y=value), outcome(y=far), None)
    wide = outcome(y=value.double())
    assert difference_of(outcome(y=value), outcome(y=near), wide) is None
    half = value.half()
    assert difference_of(outcome(y=half), outcome(y=half + 2e-4), outcome(y=value.double())) is None


@pytest.mark.parametrize(
    ("expected", "found", "line"),
    [
        (None, torch.zeros(2), "y is a tensor, not None"),
        (torch.zeros(2), None, "y is None, not a tensor"),
        (torch.zeros(2), torch.zeros(3), r"y is torch.float32 of [3], not torch.float32 of [2]"),
        (torch.arange(2), torch.arange(2).flip(0), "y has other values"),
        (torch.tensor([1.0, float("nan")]), torch.ones(2), "y is not a number in other places"),
        (3, 4, "y is 4, not 3"),
    ],
)
def test_what_differs_is_named(expected, found, line):
    assert difference_of(outcome(y=expected), outcome(y=found), None) == line


def test_what_is_missing_and_what_is_drawn_afterwards_count():
    one = torch.ones(1)
    assert difference_of(outcome(y=one), outcome(), None) == "y is missing"
    assert difference_of(outcome(), outcome(y=one), None) == "y is there"
    other = outcome(random=[STATE[0] + 1], y=one)
    assert difference_of(outcome(y=one), other, None) == "random numbers drawn after the call are others"
    assert difference_of(outcome(y=one), other, None, but=unlike(outcome(y=one), other)) is None


def test_what_is_no_number_in_both_is_the_same():
    one = torch.tensor([1.0, float("nan")])
    assert same_numbers(one, one.clone()) and not same_numbers(one, torch.ones(2))
    assert not same_numbers(torch.ones(2), torch.ones(3))


def test_what_two_calls_of_the_model_do_otherwise_is_not_compared():
    one, two = torch.ones(1), torch.zeros(1)
    but = unlike(outcome(y=one, z=one), outcome(y=two, z=one))
    assert but.values == {"y"} and not but.facts and not but.random
    assert difference_of(outcome(y=one, z=one), outcome(y=two, z=one), None, but=but) is None
    assert difference_of(outcome(y=one, z=one), outcome(y=two, z=two), None, but=but).startswith("z differs")
