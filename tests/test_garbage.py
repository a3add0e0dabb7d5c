from __future__ import annotations

import gc

import pytest

from memopt.garbage import collecting_rarely


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
