"""Why code for many sizes does not serve a call."""

import pytest

from memopt.step.sizes_apart import MadeAnewError, SizesError


def test_whether_other_sizes_are_served_is_said():
    assert not SizesError("a guard").others and SizesError("a guard", others=True).others
    with pytest.raises(SizesError, match="a larger size") as raised:
        raise MadeAnewError("a larger size")
    assert raised.value.others
