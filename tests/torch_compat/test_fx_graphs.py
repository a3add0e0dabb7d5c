from __future__ import annotations

import operator

import torch
from torch import fx, nn

from memopt.torch_compat import fx_graphs


def test_a_lazy_module_computes_what_its_graph_says() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operator.add, (x, 1)))
    assert fx_graphs.lazy_module(nn.Module(), graph)(2) == 3


def test_erased_nodes_say_so() -> None:
    graph = fx.Graph()
    node = graph.placeholder("x")
    assert not fx_graphs.is_erased(node)
    graph.erase_node(node)
    assert fx_graphs.is_erased(node)


def test_operands_that_are_set_are_read() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.create_node("call_function", torch.add, (), None)
    fx_graphs.set_operands(node, (x, 2), {"alpha": 3})
    graph.output(node)
    assert node in x.users and node.kwargs == {"alpha": 3}
    assert fx_graphs.lazy_module(nn.Module(), graph)(torch.ones(1)).item() == 7
