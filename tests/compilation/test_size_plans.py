"""Plans for code of many sizes are counted once they are wanted, up to as many as may be made."""

from memopt.compilation.size_plans import SizePlans


def test_plans_are_counted_once_they_are_wanted():
    plans = SizePlans()
    assert not plans.begins() and plans.made == 0
    plans.want()
    assert plans.begins() and plans.begins() and plans.made == 2


def test_where_there_is_no_better_plan_none_is_left_to_be_made():
    plans = SizePlans()
    plans.want()
    plans.end(3)
    assert plans.made == 3 and plans.wanted
