"""Which of a graph's outputs are one tensor: they are the same object for the caller where they are in the model.

AOTAutograd makes each output that is a view of another one anew, and common subexpressions make two views one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import storages_of, value_of


def as_identical(graph_module: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Read off a graph of Dynamo's which of its outputs are one tensor.

    Args:
        graph_module: before anything is changed in it.

    Returns:
        Wraps a function that returns the graph's outputs: those that are one tensor in the model are one object, and
        no others are.
    """
    outputs: list[Any] = list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
    nodes = [(place, node) for place, node in enumerate(outputs) if isinstance(node, fx.Node)]
    tensors = [(place, node) for place, node in nodes if isinstance(value_of(node), torch.Tensor)]
    firsts: dict[int, int] = {}
    first = {place: firsts.setdefault(id(value_of(node)), place) for place, node in tensors}
    memory: dict[frozenset[int], list[int]] = {}
    for place, node in tensors:
        memory.setdefault(storages_of(node), []).append(place)
    shared = [(place, first[place]) for group in memory.values() if len(group) > 1 for place in group]

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        return run if not shared else lambda *args: _identical(list(run(*args)), shared)

    return around


def _identical(returned: list[Any], first: Sequence[tuple[int, int]]) -> list[Any]:
    known: set[int] = set()
    for place, same in first:
        if same != place:
            returned[place] = returned[same]
            continue
        value = returned[place]
        if id(value) in known and isinstance(value, torch.Tensor) and not (value.requires_grad and value.is_leaf):
            with torch.set_grad_enabled(value.requires_grad):
                returned[place] = value = value.view_as(value)
        known.add(id(value))
    return returned
