"""A step problem is taken as it is, or refused with the operation or the storage at fault."""

import dataclasses

import pytest

from memopt.solve.problem import ProblemError
from tests.solve.hand import STEP, A, B, H, T, X


def test_derived_numbers_follow_from_the_operations():
    assert STEP.producer == (-1, 0, 1, -1, 2, 3)
    assert STEP.base_seconds == 15.0


def test_seconds_are_added_without_rounding():
    assert dataclasses.replace(STEP, costs=(1e16, 1.0, 1.0, 1.0)).base_seconds == 1e16 + 4  # one by one: 1e16


@pytest.mark.parametrize("forward", [0, 4])
def test_a_step_may_be_all_forward_or_all_backward(forward):
    reads = ((X,), (A,), (B,), (A, 4))
    assert dataclasses.replace(STEP, reads=reads, forward=forward).forward == forward


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"writes": ((A,), (B,), (4,))}, "writes has 3 entries for 4 operations"),
        ({"costs": (1.0,)}, "costs has 1 entries for 4 operations"),
        ({"workspace": (0,) * 5}, "workspace has 5 entries for 4 operations"),
        ({"recomputable": ()}, "recomputable has 0 entries for 4 operations"),
        ({"forward": 5}, r"forward is 5, not within 0\.\.4"),
        ({"forward": -1}, r"forward is -1, not within 0\.\.4"),
        ({"sizes": (1000, 10, -1, 4, 5, 7)}, "a size or a workspace is negative"),
        ({"workspace": (0, -3, 0, 0)}, "a size or a workspace is negative"),
        ({"costs": (1.0, -2.0, 4.0, 8.0)}, "a cost is negative or not finite"),
        ({"costs": (1.0, float("inf"), 4.0, 8.0)}, "a cost is negative or not finite"),
        ({"costs": (1.0, float("nan"), 4.0, 8.0)}, "a cost is negative or not finite"),
        ({"resident": frozenset({X, T})}, r"both resident and arriving: \[3\]"),
        ({"pinned": frozenset({6})}, "names a storage that does not exist"),
        ({"arriving": frozenset({T, 9})}, "names a storage that does not exist"),
        ({"resident": frozenset({X, -1})}, "names a storage that does not exist"),
        ({"reads": ((X,), (A, A), (B, T), (A, 4))}, r"operation 1 names a storage twice: \(1, 1\)"),
        ({"writes": ((A,), (B, B), (4,), (H,))}, r"operation 1 names a storage twice: \(2, 2\)"),
        ({"reads": ((X,), (B,), (B, T), (A, 4))}, "operation 1 reads storage 2 before it exists"),
        ({"reads": ((X,), (A, T), (B, T), (A, 4))}, "operation 1 reads storage 3 before it exists"),
        ({"reads": ((X,), (A,), (B, 99), (A, 4))}, "operation 2 reads storage 99 before it exists"),
        ({"writes": ((A,), (B, 6), (4,), (H,))}, "operation 1 writes storage 6, which does not exist"),
        ({"writes": ((A,), (B, -1), (4,), (H,))}, "operation 1 writes storage -1, which does not exist"),
        ({"writes": ((A,), (B, A), (4,), (H,))}, "operation 1 writes storage 1, which has a producer already"),
        ({"writes": ((A, X), (B,), (4,), (H,))}, "operation 0 writes storage 0, which has a producer already"),
        ({"writes": ((A, T), (B,), (4,), (H,))}, "operation 0 writes storage 3, which has a producer already"),
    ],
)
def test_contradicting_numbers_are_refused(change, message):
    with pytest.raises(ProblemError, match=message):
        dataclasses.replace(STEP, **change)
