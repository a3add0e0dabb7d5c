"""Outputs of a graph that are its inputs, where it writes to any: the caller's own tensors are returned for them.

AOTAutograd returns the new values of written inputs before the outputs. One that it writes within the graph and that is
an output too it puts in place by its place among the outputs alone, and so in place of another output: a counter of
`self.steps += 1`, say, for what the model computes (seen on torch 2.11 and 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import value_of, writes


def inputs_outside(graph_module: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have a graph of Dynamo's return no inputs, where it writes to any.

    Args:
        graph_module: edited where it has such outputs.

    Returns:
        Wraps a function that returns what the graph returns now: it returns what the graph returned before.
    """
    nodes = list(graph_module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    places = {id(value_of(node)): place for place, node in enumerate(inputs) if _is_tensor(node)}
    end = graph_module.graph.output_node()
    outputs: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    found = {
        place: places[id(value_of(node))]
        for place, node in enumerate(outputs)
        if isinstance(node, fx.Node) and _is_tensor(node) and id(value_of(node)) in places
    }
    if not found or not any(writes(node) for node in nodes if node.op.startswith("call")):
        return lambda run: run
    end.args = (tuple(node for place, node in enumerate(outputs) if place not in found),)
    graph_module.recompile()
    return lambda run: lambda *args: _filled(run(*args), found, args)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(value_of(node), torch.Tensor)


def _filled(returned: Sequence[Any], found: dict[int, int], args: Sequence[Any]) -> list[Any]:
    whole = list(returned)
    for place, source in found.items():
        whole.insert(place, args[source])
    return whole
