from __future__ import annotations

import resource
import sys

import pytest

from memopt.common.one_piece import in_one_piece

CALLS = 2000


def nothing():
    return None


def called_again_and_again(depth):
    """Page faults of the most that any depth up to this one takes for some calls of a function."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        nothing()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return max(taken, called_again_and_again(depth - 1)) if depth else taken


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or not (3, 11) <= sys.version_info < (3, 14) or sys.platform != "linux",
    reason="how CPython 3.11 to 3.13 keep frames",
)
def test_no_depth_has_its_calls_ask_the_system_for_memory():
    assert called_again_and_again(300) >= CALLS, "what this is there for does not happen here"
    assert in_one_piece(called_again_and_again)(300) < CALLS // 2


def test_a_function_is_what_it_was():
    def add(a, /, b, *, c=3):
        """Add."""
        return a + b + c

    made = in_one_piece(add)
    assert made(1, b=2) == 6 and made(1, 2, c=0) == 3
    assert made.__name__ == "add" and made.__doc__ == "Add."
    with pytest.raises(ZeroDivisionError):
        in_one_piece(lambda: 1 / 0)()
