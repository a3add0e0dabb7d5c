"""Whoever wants to see each pass's model."""

import pytest

from memopt.onnx.observe import observed, observing


def test_within_the_block_alone_the_innermost_is_told():
    outer, inner = [], []
    observed("none", "a", "b")
    with observing(lambda *seen: outer.append(seen)):
        observed("first", "a", "b")
        with pytest.raises(ValueError), observing(lambda *seen: inner.append(seen)):
            observed("second", "b", "c")
            raise ValueError
        observed("third", "c", "c")
    observed("fourth", "c", "d")
    assert outer == [("first", "a", "b"), ("third", "c", "c")] and inner == [("second", "b", "c")]
