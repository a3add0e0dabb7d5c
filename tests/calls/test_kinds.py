"""Of which kind a call is, and in which order that is found out."""

from types import SimpleNamespace

import pytest
import torch

from memopt.calls.guard_fast_path import Kind
from memopt.calls.kinds import Kinds


class Asked:
    """Stands for gradients, calls of a step, and the guard fast path; notes what is asked."""

    def __init__(self, exist=False, likely=False):
        self.asked, self._exist, self._likely, self.ended = [], exist, likely, []

    def exist(self):
        self.asked.append("gradients")
        return self._exist

    def likely(self):
        return self._likely

    def kind(self, gradients, accumulating, given):
        return Kind(gradients, accumulating)

    def find(self, kind, args, kwargs, *, early):
        self.asked.append(("guards", kind.accumulating, early))
        return SimpleNamespace(end=lambda: self.ended.append(kind))


def found(asked, *, budgeted=True, latest=None):
    return Kinds(asked, asked, asked, budgeted=budgeted).find((), {}, latest)[0]


def test_guards_are_asked_first_where_there_are_hardly_any_gradients():
    asked = Asked()
    assert found(asked) == Kind(True, False)
    assert asked.asked == [("guards", False, False), "gradients"]


def test_gradients_are_asked_first_where_they_are_likely():
    asked = Asked(exist=True, likely=True)
    assert found(asked) == Kind(True, True)
    assert asked.asked[0] == "gradients" and asked.asked[1] == ("guards", True, False)


def test_a_graph_that_was_found_in_vain_is_given_up():
    asked = Asked(exist=True)
    assert found(asked, latest=Kind(True, True)) == Kind(True, True)
    assert asked.ended == [Kind(True, False)] and asked.asked[-1] == ("guards", True, True)


@pytest.mark.parametrize(("budgeted", "enabled"), [(False, True), (True, False)])
def test_without_a_budget_or_gradients_nothing_is_accumulated(budgeted, enabled):
    asked = Asked(exist=True, likely=True)
    with torch.set_grad_enabled(enabled):
        assert found(asked, budgeted=budgeted) == Kind(enabled, False)
        assert Kinds(asked, asked, asked, budgeted=budgeted).alone() == Kind(enabled, False)
    assert "gradients" not in asked.asked


def test_a_call_without_gradients_runs_beside_those_of_a_step_of_training_alone():
    asked = Asked(exist=True)
    kinds = Kinds(asked, asked, asked, budgeted=True)
    with torch.no_grad():
        assert kinds.find((), {}, None)[0] == Kind(False, False) and "gradients" not in asked.asked
    kinds.find((), {}, None)
    with torch.no_grad():
        assert kinds.find((), {}, None)[0] == Kind(False, True)
