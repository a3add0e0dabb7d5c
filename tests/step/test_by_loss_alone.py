"""Refusals after which steps are planned for the gradients of their loss alone, as later runs of a script know them."""

import pytest
import torch
from torch import fx, nn

from memopt.budget import BudgetError
from memopt.step import by_loss_alone
from memopt.step.by_loss_alone import ByLossAlone, graph_key
from memopt.step.script_store import ScriptStore

RELU, X = fx.symbolic_trace(nn.Sequential(nn.ReLU())), torch.zeros(2, 3)


def refusal(minimum_bytes: int) -> BudgetError:
    return BudgetError(minimum_bytes, 1_000_000)


def seen(model: str = "Net", budget: str = "1MB", inputs: torch.Tensor = X, others: bool = True) -> ByLossAlone:
    found = ByLossAlone(model, budget)
    found.sees(RELU, [inputs], others=others)
    return found


def returns(monkeypatch, size: int) -> None:
    monkeypatch.setattr(by_loss_alone, "bytes_beside_numbers", lambda graph: size)


def test_what_was_refused_is_remembered_by_the_same_script_model_budget_and_graph(monkeypatch):
    returns(monkeypatch, 500_000)
    refused = seen()
    assert not seen().remembers() and not refused.notes
    assert refused.has_fewer_gradients and not seen(others=False).has_fewer_gradients
    assert not ByLossAlone("Net", "1MB").has_fewer_gradients, "no graph was seen"
    assert refused.refused(refusal(2_000_000)) and not refused.refused(refusal(1_900_000))
    assert not refused.has_fewer_gradients
    later = seen()
    assert later.remembers() and not later.remembers()
    assert later.needed == refused.needed == "2.00 MB or more" and not later.held
    (note,) = later.notes
    assert note.endswith("2.00 MB or more")
    assert not any(each.remembers() for each in (seen(budget="2MB"), seen("Other"), seen(inputs=X[:1])))


def test_then_a_loop_is_planned_for_that_keeps_the_loss_alone_where_that_may_help(monkeypatch):
    returns(monkeypatch, 500_000)
    refused = seen()
    assert refused.refused(refusal(2_000_000)) and refused.refused(refusal(1_400_000))
    assert not refused.refused(refusal(1_300_000))
    assert refused.stage == ("2.00 MB or more", "1.40 MB or more") and len(refused.notes) == 2
    later = seen()
    assert later.remembers() and later.stage == refused.stage
    for each in (refused, later):  # what is named is what every loop keeps
        last = each.last(refusal(1_300_000))
        assert last.minimum_bytes == 1_400_000 and "1.30 MB are enough for a loop that keeps the loss" in str(last)
        assert last.__traceback__ is None
        assert each.last(refusal(1_500_000)).minimum_bytes == 1_500_000


@pytest.mark.parametrize(
    ("size", "lets_go", "done"),
    [(400_000, True, True), (399_999, True, False), (0, True, False), (400_000, False, False)],
)
def test_it_is_not_where_nothing_else_has_a_gradient_unless_outputs_are_large_and_freed(
    monkeypatch, size, lets_go, done
):
    returns(monkeypatch, size)
    assert seen(others=False).refused(refusal(1_400_000), lets_go=lets_go) is done


def test_nothing_is_planned_so_before_a_graph_was_seen():
    assert not ByLossAlone("Net", "1MB").refused(refusal(2_000_000))


@pytest.mark.parametrize("record", [{"needed": 3}, {"needed": "1 MB", "held": None, "minimum_bytes": 0}])
def test_a_record_of_another_form_is_none(monkeypatch, record):
    returns(monkeypatch, 0)
    ScriptStore("refusals").put("Net", "1MB", graph_key(RELU, [X]), record)
    assert not seen().remembers()


def test_graphs_are_told_apart_by_code_and_inputs():
    same, other = (fx.symbolic_trace(nn.Sequential(*layers)) for layers in ([nn.ReLU()], []))
    assert graph_key(RELU, [X]) == graph_key(same, [torch.ones(2, 3)])
    keys = graph_key(RELU, [X]), graph_key(other, [X]), graph_key(RELU, [X[:1]]), graph_key(RELU, [X.double()])
    assert len(set(keys)) == 4
