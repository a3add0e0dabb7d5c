"""In which order a call without room is tried; whole steps of several calls are in training/test_several_calls.py."""

from __future__ import annotations

import types

import pytest

from memopt.budget import BudgetError
from memopt.calls.beside_earlier import run_beside
from memopt.calls.guard_fast_path import Kind
from memopt.step.earlier_calls import DoesNotFitBesideError

KIND = Kind(True, False)


class Step(types.SimpleNamespace):
    def has_last_word(self, last):
        self.last_word = last


class Steps(dict):
    """Sessions by plan, and what is done with them."""

    def of(self, kind):
        return self.setdefault(kind.plan, Step(last_word=False))

    def forget(self, plan):
        self.pop(plan, None)


class Calls:
    def __init__(self, *, room: bool, can_drop: bool) -> None:
        self.available, self.can_drop, self.dropped = room, can_drop, 0

    def make_fit(self, session, graph):
        return self.available

    def drop(self):
        self.dropped += 1


@pytest.mark.parametrize(
    ("room", "can_drop", "failures", "expected", "dropped"),
    [
        (True, False, 0, [(False, False)], 0),  # as it is planned
        (False, False, 0, [(True, True)], 0),  # anew, with the last word
        (True, False, 1, [(False, False), (True, True)], 0),
        (False, True, 0, [(True, False)], 0),  # what the earlier ones hold is enough to plan with
        (False, True, 1, [(True, False), (True, True)], 1),  # and where not, they let go
    ],
)
def test_ways_are_tried_one_after_another(room, can_drop, failures, expected, dropped):
    sessions, calls, tried = Steps(), Calls(room=room, can_drop=can_drop), []

    def run(kind):
        tried.append((kind.beside, sessions.of(kind).last_word))
        if len(tried) <= failures:
            raise DoesNotFitBesideError(None)
        return "outputs"

    assert run_beside(sessions, calls, KIND, object(), run) == "outputs"
    assert tried == expected and calls.dropped == dropped
    assert not any(session.last_word for session in sessions.values())


def test_what_was_planned_beside_calls_that_had_let_go_serves_the_steps_after_that():
    """Two nets that train in turn, one within the other's loss, compiled two graphs anew in each step."""
    sessions, tried = Steps(), []
    planned = sessions.of(KIND._replace(calls=1, beside=True))

    class Later(Calls):
        def make_fit(self, session, graph):
            self.dropped += graph == "planned beside"
            return graph == "planned beside"

    def run(kind):
        tried.append(kind.beside)
        if not calls.dropped:
            raise DoesNotFitBesideError("planned beside")
        return "outputs"

    calls = Later(room=False, can_drop=True)
    assert run_beside(sessions, calls, KIND, "planned alone", run) == "outputs"
    assert tried == [True, True] and calls.dropped == 1
    assert sessions.of(KIND._replace(calls=1, beside=True)) is planned


def test_a_call_that_has_no_room_at_all_is_refused():
    def run(kind):
        raise BudgetError(2, 1)

    with pytest.raises(BudgetError):
        run_beside(Steps(), Calls(room=False, can_drop=True), KIND, None, run)
