from __future__ import annotations

import gc
import weakref

import pytest
import torch

from memopt.common import garbage
from memopt.common.garbage import collect, collect_all, collecting_rarely, looking_once, python_tensors

FROZEN_BY_THE_CALLER = garbage._frozen_by_the_caller


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
        self.own = self


@pytest.fixture
def nothing_frozen(monkeypatch):
    """The tests leave aside what they begin with, and know it: see `_frozen_is_known` of tests/conftest.py."""
    monkeypatch.setattr(garbage, "_frozen_by_the_caller", FROZEN_BY_THE_CALLER)
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.long
def test_what_is_left_behind_between_two_looks_is_found_and_what_stays_is_left_aside(nothing_frozen):
    kept = [Cycle() for _ in range(100)]
    with looking_once():
        collect()
        aside = gc.get_freeze_count()
        assert aside >= len(kept)
        lost = weakref.ref(Cycle())
        collect()
        assert lost() is None and gc.get_freeze_count() >= aside
        with looking_once():
            collect()
        assert gc.get_freeze_count() >= aside
    assert gc.get_freeze_count() == 0
    collect()
    assert gc.get_freeze_count() == 0


def test_what_the_caller_has_frozen_stays_so(nothing_frozen):
    gc.collect()  # garbage of other tests would be frozen with the rest, and some of it dies later
    gc.freeze()
    try:
        before = gc.get_freeze_count()
        with looking_once():
            collect()
        assert before - 1000 < gc.get_freeze_count() <= before  # some of it dies meanwhile, in threads of other tests
    finally:
        gc.unfreeze()


def test_what_was_in_use_when_it_was_looked_at_is_found_where_all_is_looked_at(nothing_frozen):
    with looking_once():
        kept = Cycle()
        collect()  # leaves it aside
        lost = weakref.ref(kept)
        del kept
        collect()
        assert lost() is not None
        collect_all()
        assert lost() is None and FROZEN_BY_THE_CALLER()
    collect_all()
    assert not FROZEN_BY_THE_CALLER()  # nothing but what Python 3.12 itself leaves aside


def test_tensors_that_are_left_aside_are_seen(nothing_frozen):
    def seen(tensor):
        return sum(each is tensor for each in python_tensors())

    early = torch.ones(3)
    with looking_once():
        collect()
        late = torch.ones(4)
        collect()
        assert seen(early) == seen(late) == 1
        alive = weakref.ref(early)
        del early
        assert alive() is None and seen(late) == 1
    assert seen(late) == 1 and not FROZEN_BY_THE_CALLER()
