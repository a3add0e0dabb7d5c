"""Calls that an earlier run of a script has met: expected once, and taken back."""

from memopt.budget import parse_budget
from memopt.step.earlier_calls import KnownCalls
from memopt.step.expected_calls import ExpectedCalls
from memopt.step.reference import Reference


def test_calls_are_expected_once_and_a_fraction_is_of_what_it_was_before():
    KnownCalls().put("Model", "1GB", "graph", 3, 300)
    expected, reference, budget = ExpectedCalls(), Reference(), parse_budget("1GB")
    assert not expected and expected.of_script("Model", None, "graph") == (1, 0)
    assert expected.of_script("Model", budget, "graph") == (3, 300)
    reference.trains(1000, "alone")
    expected.begin(200, reference)
    assert expected and expected.of_script("Model", budget, "graph") == (1, 0)
    reference.trains(3000, "together", calls=3)
    assert expected.take_back(reference) == 200 and reference.training == 1000


def test_fewer_calls_are_what_later_runs_expect():
    KnownCalls().put("Model", "1GB", "fewer", 3, 300)
    budget = parse_budget("1GB")
    ExpectedCalls().were_fewer("Model", budget, "fewer", 2)
    assert ExpectedCalls().of_script("Model", budget, "fewer") == (2, 0)
