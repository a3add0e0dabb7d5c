"""Plans corrected by their code: how often, by how much, and which one is taken in the end."""

import dataclasses
from types import SimpleNamespace

import pytest

from memopt.step.plan_feedback import corrected
from memopt.step.plan_request import PlanRequest


@dataclasses.dataclass(frozen=True)
class Attempt:
    correction: int
    saving: int
    excess: int | None


def session(*, feasible=True, recomputes=True, gain=0.05):
    return SimpleNamespace(
        request=PlanRequest(), limit_bytes=1000, feasible=feasible, recomputes=recomputes, gain=lambda more: gain
    )


def attempts(step, gap, least=0, room=1000):
    """Code that takes `gap` bytes more than its plan, whose plan takes all the room there is."""
    made = []

    def attempt():
        plan = max(least, room + step.request.correction)
        made.append(Attempt(step.request.correction, -gap, plan + gap - room))
        return made[-1]

    return attempt, made


def test_a_plan_whose_code_takes_more_is_made_for_less():
    step = session()
    attempt, made = attempts(step, 80)
    best, last = corrected(step, step.request, attempt, lambda: True)
    assert [one.correction for one in made] == [0, -80 - 10] and last
    assert best is made[1] and best.excess == -10


def test_a_plan_whose_code_takes_much_less_is_made_for_more():
    step = session()
    attempt, made = attempts(step, -100)
    best, last = corrected(step, step.request, attempt, lambda: True)
    assert [one.excess for one in made] == [-100, 0] and best is made[1] and last
    for step in (session(recomputes=False), session(gain=0.002)):
        assert corrected(step, step.request, attempts(step, -100)[0], lambda: True)[0].excess == -100, (
            "there is nothing to gain"
        )


def test_where_with_more_room_too_much_is_taken_half_of_it_is_tried_once():
    for third, kept in ((Attempt(50, 0, 10), -100), (Attempt(50, 0, -30), -30), (Attempt(50, 90, -90), -90)):
        step, asked, found = session(), [], iter([Attempt(0, 100, -100), Attempt(100, 0, 60), third])

        def attempt(step=step, asked=asked, found=found):
            asked.append(step.request.correction)
            return next(found)

        best, last = corrected(step, step.request, attempt, lambda: True)
        assert asked == [0, 100, 50] and best.excess == kept and last == (best is third)


def test_the_first_plan_stays_where_half_the_room_gains_little():
    step = session()
    step.gain = lambda more: 0.02 if more >= 100 else 0.002
    found = iter([Attempt(0, 100, -100), Attempt(100, 0, 60)])
    best, last = corrected(step, step.request, lambda: next(found), lambda: True)
    assert best.excess == -100 and not last


def test_the_last_attempt_is_of_the_deepest_plan():
    step, seen = session(), []

    def attempt():  # whatever is asked for, its code takes as much more
        seen.append(step.request.correction)
        return Attempt(step.request.correction, -10 * len(seen), 10) if len(seen) < 5 else Attempt(0, 0, -1)

    best, last = corrected(step, step.request, attempt, lambda: True)
    assert seen == [0, -11, -21, -31, -1000] and best.excess == -1 and last


@pytest.mark.parametrize(
    ("step", "may"), [(session(feasible=False), True), (session(), False)], ids=["the deepest plan", "settled"]
)
def test_what_cannot_be_planned_for_less_is_not_tried_again(step, may):
    attempt, made = attempts(step, 80)
    assert corrected(step, step.request, attempt, lambda: may)[0] is None and len(made) == 1


def test_without_a_budget_or_without_code_there_is_one_attempt():
    assert corrected(session(), PlanRequest(), lambda: None, lambda: True)[0] is None
    only = Attempt(0, 5, None)
    assert corrected(session(), PlanRequest(), lambda: only, lambda: True) == (only, True)
