"""What is planned instead of a step that was refused, one thing after the other."""

from types import SimpleNamespace

import pytest

from memopt.budget import Budget, BudgetError
from memopt.compilation.fallbacks import Fallbacks


class Session:
    """One whose step may go by the loss alone; it notes what becomes of it."""

    def __init__(self, budget=None, **facts):
        self.budget, self.happened = budget or Budget(1000, None, "1000B"), []
        self.soft, self.broken, self.calls, self.earlier, self.verify, self.feasible = False, False, 1, [], True, False
        self.limit_bytes, self.beside, self.step = 1000, "", SimpleNamespace(base=100)
        self.reference = SimpleNamespace(
            at_least=lambda size: self.happened.append(("at least", size)),
            supposes=lambda size: self.happened.append(("supposed", size)),
            begins_with_gradients=lambda whole, gradients: self.happened.append((whole, gradients)) or self.grows,
            whole=False,
        )
        self.resident, self.role = SimpleNamespace(gradients=0), SimpleNamespace(trains=True)
        self.together = self.others = self.is_part = self.grows = self.counts_on_expected = False
        self.__dict__.update(facts)

    def one_call(self):
        before, self.together = self.together, False
        return before

    def waiting(self):
        return self.others

    def part(self):
        return self.is_part

    def engine(self):
        return SimpleNamespace(frees_outputs=True)

    def forget_step(self):
        self.happened.append("forgotten")

    def note(self, text):
        self.happened.append(text)

    def excess_with(self, held):
        return max(0, 100 + held - 1000)

    def minimum_budget(self, taken):
        return taken


@pytest.fixture
def fallbacks(monkeypatch):
    found = Fallbacks("Model", "1000B")
    stages = [("1 kB", ""), ("1 kB", "1 kB")]

    def refused(error, *, lets_go):
        found.by_loss_alone.needed, found.by_loss_alone.held = stages.pop(0) if stages else ("", "")
        return any(found.by_loss_alone.stage)

    monkeypatch.setattr(found.by_loss_alone, "refused", refused)
    return found


REFUSED = BudgetError(1500, 1000)


def test_calls_that_were_planned_together_are_planned_one_by_one_first(fallbacks):
    session = Session(together=True)
    fallbacks.plan_for_less(session, REFUSED)
    assert not session.happened and not any(fallbacks.by_loss_alone.stage)


def test_a_fraction_waits_for_the_other_models_once(fallbacks):
    session = Session(Budget(None, 0.5, "50%"), others=True)
    fallbacks.plan_for_less(session, REFUSED)
    assert session.happened == [("at least", 3001), "forgotten"]
    fallbacks.plan_for_less(session, REFUSED)
    assert len(session.happened) > 2 and any(fallbacks.by_loss_alone.stage)


def test_then_it_is_planned_for_the_loss_alone_until_there_is_no_less(fallbacks):
    session = Session()
    for stage in (("1 kB", ""), ("1 kB", "1 kB")):
        fallbacks.plan_for_less(session, REFUSED)
        assert fallbacks.by_loss_alone.stage == stage and "forgotten" in session.happened
    assert len([text for text in session.happened if "loss alone" in text]) == 3
    with pytest.raises(BudgetError) as found:
        fallbacks.plan_for_less(session, REFUSED)
    assert found.value is REFUSED


@pytest.mark.parametrize(
    "facts", [{"verify": "full"}, {"soft": True}, {"calls": 2}, {"earlier": [1]}, {"broken": True}]
)
def test_where_all_gradients_are_wanted_the_refusal_stays(fallbacks, facts):
    with pytest.raises(BudgetError):
        fallbacks.plan_for_less(Session(**facts), REFUSED)


def test_code_that_no_plan_can_save_is_refused_before_it_is_made(fallbacks, monkeypatch):
    session, stages = Session(), fallbacks.by_loss_alone
    fallbacks.raise_if_hopeless(session, 5000)  # there are no fewer gradients to plan for
    monkeypatch.setattr(type(stages), "has_fewer_gradients", property(lambda self: True))
    fallbacks.raise_if_hopeless(session, 900)
    fallbacks.raise_if_hopeless(Session(feasible=True), 901)
    with pytest.raises(BudgetError) as found:
        fallbacks.raise_if_hopeless(session, 901)
    assert (found.value.minimum_bytes, found.value.budget_bytes) == (1001, 1000)


def test_a_fraction_of_a_part_waits_for_the_rest_of_its_step_once_for_each_call(fallbacks):
    session = Session(Budget(None, 0.5, "50%"), is_part=True)
    assert fallbacks.has_less_than(session, REFUSED)
    fallbacks.plan_for_less(session, REFUSED)
    session.earlier = [1]
    fallbacks.plan_for_less(session, REFUSED)
    assert session.happened == [("supposed", 3001), "forgotten"] * 2
    assert not fallbacks.has_less_than(session, REFUSED)
    with pytest.raises(BudgetError):
        fallbacks.plan_for_less(session, REFUSED)


@pytest.mark.parametrize("facts", [{"soft": True}, {"budget": Budget(1000, None, "1000B")}, {"is_part": False}])
def test_nothing_else_waits_for_the_rest_of_its_step(fallbacks, facts):
    session = Session(**{"budget": Budget(None, 0.5, "50%"), "is_part": True, "earlier": [1]} | facts)
    with pytest.raises(BudgetError):
        fallbacks.plan_for_less(session, REFUSED)
    assert not session.happened


def test_a_step_that_was_seen_whole_waits_for_nothing(fallbacks):
    session = Session(Budget(None, 0.5, "50%"), is_part=True, earlier=[1])
    session.reference.whole = True
    assert not fallbacks.has_less_than(session, REFUSED)
    with pytest.raises(BudgetError):
        fallbacks.plan_for_less(session, REFUSED)


def test_a_fraction_of_a_step_that_begins_with_gradients_is_of_them_too(fallbacks):
    facts = {"resident": SimpleNamespace(gradients=50), "step": SimpleNamespace(base=100, whole=2000)}
    session = Session(Budget(None, 0.5, "50%"), grows=True, **facts)
    fallbacks.plan_for_less(session, REFUSED)
    assert session.happened == [(2000, 50), "forgotten"]
