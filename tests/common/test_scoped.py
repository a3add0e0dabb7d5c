"""What holds for a block: a context variable's value, and hooks, which are set up once."""

import threading
from contextvars import ContextVar

import pytest

from memopt.common.scoped import Hook, scoped

number: ContextVar[int] = ContextVar("number", default=0)


def test_the_value_of_before_is_back_after_the_block_and_after_an_error():
    with scoped(number, 1):
        with pytest.raises(KeyError), scoped(number, 2):
            assert number.get() == 2
            raise KeyError
        assert number.get() == 1
    assert number.get() == 0


def test_a_hook_is_set_up_when_it_is_first_wanted_and_acts_within_blocks_of_its_thread():
    calls, elsewhere = [], []

    @Hook
    def hook():
        calls.append(hook.in_force)
        if len(calls) == 1:
            raise KeyError

    assert calls == [] and not hook.in_force
    with pytest.raises(KeyError):
        hook.within()
    for _ in range(2):
        with hook.within():
            with hook.within():
                assert hook.in_force
            thread = threading.Thread(target=lambda: elsewhere.append(hook.in_force))
            thread.start()
            thread.join()
            assert hook.in_force
        assert not hook.in_force
    assert calls == [False, False] and elsewhere == [False, False]
