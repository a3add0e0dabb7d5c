"""What the parts of a step ask of sessions that may be gone."""

import weakref
from types import SimpleNamespace

import torch
from torch import nn

from memopt.calls.weak_sessions import (
    allow_limit,
    gradients_of,
    kept_more,
    look_alone,
    look_at,
    models_waiting,
    planning_available,
    release,
    reserved_for_others,
)
from memopt.step.earlier_calls import Ran


class Sessions:
    """As much of a model's sessions as is asked of them."""

    def __init__(self):
        self.allowed, self.looked, self.last = [], [], None
        self.group = SimpleNamespace(waiting=lambda: 2, reserve=lambda sessions, room: room // 2)

    def look(self, session, calls, beside=()):
        self.looked.append((session, calls, beside))

    def allow(self, session, limit):
        self.allowed.append((session, limit))


class Session:
    functions = ()
    graph_pool = None
    ran = ("graph",)

    def kept_more(self, saved):
        return 2 * saved


def test_they_answer_while_they_are_there():
    sessions, session = Sessions(), Session()
    here, known = weakref.ref(sessions), weakref.ref(session)
    assert models_waiting(here) == 2 and reserved_for_others(here, 10) == 5
    assert planning_available(here) is None
    sessions.last = SimpleNamespace(available=7)
    assert planning_available(here) == 7
    assert kept_more(known, [SimpleNamespace(saved=3), SimpleNamespace(saved=4)]) == 14
    look_at(here, known, ["calls"], ["others"])
    look_alone(here, session)
    assert sessions.looked == [(session, ["calls"], ["others"]), (session, [Ran(("graph",), {})], ())]
    allow_limit(here, known, 9)
    assert sessions.allowed == [(session, 9)]


def test_nobody_is_kept_alive_and_those_that_are_gone_want_nothing():
    sessions, session, model = Sessions(), Session(), nn.Linear(2, 2)
    here, known, owner = map(weakref.ref, (sessions, session, model))
    model(torch.ones(1, 2)).sum().backward()
    assert len(gradients_of(owner)) == 2
    del sessions, session, model
    assert models_waiting(here) == reserved_for_others(here, 10) == kept_more(known, []) == 0
    assert planning_available(here) is None and gradients_of(owner) == []
    allow_limit(here, known, 9)


def test_what_functions_and_recordings_hold_is_given_back():
    given = []
    session = SimpleNamespace(
        functions=[SimpleNamespace(release=lambda: given.append("function"))],
        graph_pool=SimpleNamespace(release=lambda: given.append("CUDA graphs")),
    )
    release({"plan": session})
    assert given == ["function", "CUDA graphs"]
