from __future__ import annotations

import gc
import weakref

import pytest

from memopt.garbage import collecting_new_only, collecting_rarely


def test_garbage_is_looked_for_less_often_within_and_as_before_after():
    before = gc.get_threshold()
    with pytest.raises(KeyError), collecting_rarely():
        assert gc.get_threshold()[0] > before[0]
        raise KeyError
    assert gc.get_threshold() == before
    gc.set_threshold(0)
    try:
        with collecting_rarely():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


class Cycle:
    def __init__(self):
        self.itself = self


def test_within_the_block_garbage_is_collected_among_what_is_new():
    gc.unfreeze()
    before, old = weakref.ref(Cycle()), Cycle()
    seen = weakref.ref(old)
    with pytest.raises(KeyError), collecting_new_only():
        assert before() is None, "what was garbage already is gone"
        del old
        with collecting_new_only():
            new = weakref.ref(Cycle())
            gc.collect()
            assert new() is None and seen() is not None
        assert gc.get_freeze_count(), "the outer block goes on"
        raise KeyError
    gc.collect()
    assert seen() is None and not gc.get_freeze_count()


def test_what_the_caller_has_frozen_stays_so():
    gc.freeze()
    try:
        with collecting_new_only():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
