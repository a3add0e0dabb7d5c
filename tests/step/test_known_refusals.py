"""Refusals that later runs of a script know of."""

import torch
from torch import fx, nn

from memopt.step.known_refusals import KnownRefusals, graph_key


def test_what_is_put_is_got_by_the_same_script_model_budget_and_graph():
    known = KnownRefusals()
    assert known.get("Net", "1MB", "a") == ""
    known.put("Net", "1MB", "a", "2 MB or more")
    assert KnownRefusals().get("Net", "1MB", "a") == "2 MB or more"
    assert [known.get(*key) for key in (("Net", "2MB", "a"), ("Net", "1MB", "b"), ("Other", "1MB", "a"))] == [""] * 3


def test_a_record_of_another_form_is_none():
    known = KnownRefusals()
    known.put("Net", "1MB", "c", 3)
    assert known.get("Net", "1MB", "c") == ""


def test_graphs_are_told_apart_by_code_and_inputs():
    one, same, other = (fx.symbolic_trace(nn.Sequential(*layers)) for layers in ([nn.ReLU()], [nn.ReLU()], []))
    x = torch.zeros(2, 3)
    assert graph_key(one, [x]) == graph_key(same, [torch.ones(2, 3)])
    assert len({graph_key(one, [x]), graph_key(other, [x]), graph_key(one, [x[:1]]), graph_key(one, [x.double()])}) == 4
