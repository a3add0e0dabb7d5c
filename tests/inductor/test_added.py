"""Torch's own cut leaves what rewrites have put into a graph in the phase that they put it into."""

import torch
from torch import fx

from memopt.inductor.added import mark_added, return_early
from memopt.inductor.order import ADDED
from memopt.program import Phase


def joint():
    """Forward makes a of x for the caller, and b of a for backward, which makes the gradient c of it."""
    graph = fx.Graph()
    x, tangent = graph.placeholder("x"), graph.placeholder("tangent")
    a = graph.call_function(torch.ops.aten.sin.default, (x,))
    b = graph.call_function(torch.ops.aten.cos.default, (a,))
    c = graph.call_function(torch.ops.aten.mul.Tensor, (b, tangent))
    graph.output([a, c])
    for node, phase in ((a, Phase.FORWARD), (b, Phase.FORWARD), (c, Phase.BACKWARD)):
        node.meta["phase"] = phase
    module = fx.GraphModule(torch.nn.Module(), graph)
    module.graph.output_node().meta["desc"] = ["result", "gradient"]
    return module, a, b, c


def test_what_is_added_is_marked_and_stays_in_backward_where_it_is_there():
    module, a, b, c = joint()
    mark_added(module, {a.name})
    assert [ADDED in node.meta for node in (a, b, c)] == [False, True, True]
    assert [node.meta.get("partitioner_tag") for node in (a, b, c)] == [None, None, "must_be_in_backward"]


def test_what_is_added_to_forward_for_backward_is_returned_behind_the_caller_s_results():
    module, a, b, c = joint()
    assert return_early(module, 1) == 0, "nothing is added"
    mark_added(module, {a.name})
    assert return_early(module, 1) == 1
    output = module.graph.output_node()
    assert output.args[0] == [a, b, c] and output.meta["desc"] == ["result", None, "gradient"]


def test_what_the_caller_s_results_need_is_there_anyway():
    module, a, b, c = joint()
    mark_added(module, {b.name})
    assert return_early(module, 1) == 0 and module.graph.output_node().args[0] == [a, c]
