"""What is at the ends of a step's graphs, by names of values."""

import pytest

from memopt.cuda_graphs.signature import StepSignature, signature_of


def test_places_are_those_of_forwards_arguments():
    found = signature_of(["w", "x", "b"], ["loss", "h", "w"], ["h", "w", "t"], {"b", "w"}, ["b", "x", None, "w"])
    assert found == StepSignature(frozenset({0, 2}), results=1, saved=2, gradient_of=(2, -1, -1, 0))


def test_all_that_forward_returns_may_be_saved_or_none_of_it():
    assert signature_of(["x"], ["h"], ["h"], ()) == StepSignature(frozenset(), results=0, saved=1)
    assert signature_of(["x"], ["loss"], [], ()) == StepSignature(frozenset(), results=1, saved=0)


@pytest.mark.parametrize(
    "given",
    [
        ["b", "a", "t"],  # in another order
        ["a", "t"],  # what comes last of forward is not asked for
        ["loss", "t"],
    ],
)
def test_backward_is_to_take_what_forward_passes_on_last(given):
    assert signature_of(["x"], ["loss", "a", "b"], given, ()) is None
    assert signature_of(["x"], ["loss", "a", "b"], ["a", "b", "t"], ()) is not None
