from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from memopt.capture.dynamo_graph import name_of, storages_of, writes


def graph_of(function: Callable[..., Any], *args: Any) -> fx.Graph:
    found: list[fx.Graph] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        found.append(graph_module.graph)
        return graph_module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found[0]


def set_first(x: torch.Tensor) -> torch.Tensor:
    x[0] = 1
    return x


@pytest.mark.parametrize(
    ("function", "name", "written"),
    [
        (lambda x: x.mul(2), "mul", False),
        (lambda x: x.mul_(2), "mul_", True),
        (set_first, "setitem", True),
        (lambda x: torch.nn.functional.relu(x), "relu", False),
        (lambda x: torch.nn.functional.relu(x, inplace=True), "relu", True),
        (lambda x: torch.add(x, 1, out=x), "add", True),
        (lambda x: torch.ops.aten.add_.Tensor(x, 1), "add_", True),
        (lambda x: torch.ops.aten.add.Tensor(x, 1), "add", False),
    ],
)
def test_what_a_node_calls_and_whether_it_writes(function: Callable[..., Any], name: str, written: bool) -> None:
    calls = [node for node in graph_of(function, torch.ones(3)).nodes if node.op in ("call_function", "call_method")]
    assert name in [name_of(node) for node in calls]
    assert any(map(writes, calls)) == written


def test_views_show_the_memory_of_what_they_are_of() -> None:
    nodes = list(graph_of(lambda x: (x[1:], x + 1), torch.ones(3)).nodes)
    x, view, other = nodes[0], nodes[1], nodes[2]
    assert storages_of(x) == storages_of(view) != storages_of(other)
    assert len(storages_of(other)) == 1
