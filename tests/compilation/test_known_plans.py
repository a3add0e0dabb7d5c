"""What graphs were planned for: kept once a plan stands, forgotten one by one, replayed with what it was made with."""

from types import SimpleNamespace

import pytest

from memopt.compilation.known_plans import KnownPlans
from memopt.step.stages import Stages

CODE, OPERATORS = (False, "graph"), (True, "graph")
NONE = Stages((), (), (), searched=False)


def planned(schedule=None):
    plan = None if schedule is None else SimpleNamespace(plan=SimpleNamespace(schedule=schedule))
    return SimpleNamespace(choice=plan)


@pytest.fixture
def plans():
    found = KnownPlans()
    found.keep([CODE], [planned()])
    return found


def test_a_plan_is_of_a_graph_as_it_runs(plans):
    assert plans and CODE in plans and OPERATORS not in plans


def test_what_was_made_does_not_stand_yet():
    plans = KnownPlans()
    plans.made_with([CODE], NONE, ())
    assert not plans and CODE not in plans


def test_one_graph_is_forgotten_and_others_stay(plans):
    plans.keep([OPERATORS], [planned()])
    plans.forget([CODE, (True, "another")])
    assert CODE not in plans and OPERATORS in plans
    plans.clear()
    assert not plans


def test_each_graph_has_its_plan(plans):
    with pytest.raises(ValueError):
        plans.keep([CODE, OPERATORS], [planned()])


def test_a_graph_is_replayed_with_what_its_plan_was_made_with(plans, monkeypatch):
    monkeypatch.setattr("memopt.compilation.known_plans.replay", lambda *given: given)
    assert plans.replayed(CODE, "program", NONE) == ("program", NONE, (), None)
    made = Stages((), (), (), searched=True)
    plans.made_with([CODE], made, ("lowering",))
    plans.keep([CODE], [planned("schedule")])
    assert plans.replayed(CODE, "program", NONE) == ("program", made, ("lowering",), "schedule")
    assert plans.replayed_by(CODE, "program", NONE, "another") == ("program", made, ("lowering",), "another")
    assert plans.replayed(OPERATORS, "program", NONE) == ("program", NONE, (), None)


def test_a_plan_serves_a_step_of_the_graphs_that_it_was_made_with(plans):
    other = (False, "other")
    assert plans.serves(CODE, [CODE]) and not plans.serves(CODE, [CODE, CODE]) and not plans.serves(other, [other])
    plans.keep([CODE, other], [planned(), planned()])
    assert plans.serves(CODE, [other, CODE]) and not plans.serves(CODE, [CODE, CODE])
    plans.keep([CODE, CODE], [planned(), planned()])
    assert plans.serves(CODE, [CODE, CODE]) and plans.serves(other, [CODE, other])
