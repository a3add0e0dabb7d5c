"""scoped: a context variable's value for a block, and the one of before after it."""

from contextvars import ContextVar

import pytest

from memopt.common.scoped import scoped

number: ContextVar[int] = ContextVar("number", default=0)


def test_the_value_of_before_is_back_after_the_block_and_after_an_error():
    with scoped(number, 1):
        with pytest.raises(KeyError), scoped(number, 2):
            assert number.get() == 2
            raise KeyError
        assert number.get() == 1
    assert number.get() == 0
