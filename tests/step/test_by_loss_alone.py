"""Refusals after which steps are planned for the gradients of their loss alone, as later runs of a script know them."""

import torch
from torch import fx, nn

from memopt.step.by_loss_alone import ByLossAlone, graph_key
from memopt.step.script_store import ScriptStore

RELU, X = fx.symbolic_trace(nn.Sequential(nn.ReLU())), torch.zeros(2, 3)


def seen(model: str = "Net", budget: str = "1MB", inputs: torch.Tensor = X) -> ByLossAlone:
    found = ByLossAlone(model, budget)
    found.sees(RELU, [inputs])
    return found


def test_what_was_refused_is_remembered_by_the_same_script_model_budget_and_graph():
    assert not seen().remembers()
    refused = seen()
    assert refused.refused(2_000_000) and not refused.refused(3_000_000)
    later = seen()
    assert later.remembers() and not later.remembers()
    assert later.needed == refused.needed == "2.00 MB or more" and later.note.endswith("2.00 MB or more")
    assert not any(each.remembers() for each in (seen(budget="2MB"), seen("Other"), seen(inputs=X[:1])))


def test_nothing_is_planned_so_before_a_graph_was_seen():
    assert not ByLossAlone("Net", "1MB").refused(2_000_000)


def test_a_record_of_another_form_is_none():
    ScriptStore("refusals").put("Net", "1MB", graph_key(RELU, [X]), {"needed": 3})
    assert not seen().remembers()


def test_graphs_are_told_apart_by_code_and_inputs():
    same, other = (fx.symbolic_trace(nn.Sequential(*layers)) for layers in ([nn.ReLU()], []))
    assert graph_key(RELU, [X]) == graph_key(same, [torch.ones(2, 3)])
    keys = graph_key(RELU, [X]), graph_key(other, [X]), graph_key(RELU, [X[:1]]), graph_key(RELU, [X.double()])
    assert len(set(keys)) == 4
