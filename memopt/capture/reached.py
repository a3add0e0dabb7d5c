"""Which inputs of a graph gradients of its outputs reach in eager.

Dynamo runs the model's own code on fake tensors, whose autograd nodes are eager's. A captured graph may know less of
that: of a tensor that is overwritten (`y.zero_()`), torch's decompositions keep the new value alone, and nothing says
that eager has gradients of zeros for what the tensor was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import value_of
from memopt.torch_compat.backward import is_users_function

# What has a gradient: ("output", position), or ("input", position) of an input that the graph writes to.
Shown = tuple[str, int]

# Per position of an input, what has gradients that reach it.
Reached = Mapping[int, frozenset[Shown]]


def reached_inputs(graph_module: fx.GraphModule) -> Reached:
    """What has gradients that reach which inputs of a graph of Dynamo's.

    What a backward of the user's own returns is not known, so that no path leads through it.
    """
    given = [value_of(node) for node in graph_module.graph.find_nodes(op="placeholder")]
    returned: Any = graph_module.graph.output_node().args[0]
    values = {("output", place): value_of(node) for place, node in enumerate(returned) if isinstance(node, fx.Node)}
    values |= {("input", place): value for place, value in enumerate(given)}
    places: dict[Any, int] = {}
    for place, value in enumerate(given):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            places[id(value) if value.grad_fn is None else value.grad_fn] = place
    masks: dict[Any, int] = {}
    found: dict[int, set[Shown]] = {}
    for shown, value in values.items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            mask = _mask(value.grad_fn, places, masks)
            for place in places.values():
                if mask >> place & 1:
                    found.setdefault(place, set()).add(shown)
    return {place: frozenset(sources) for place, sources in found.items()}


def _mask(root: Any, places: Mapping[Any, int], masks: dict[Any, int]) -> int:
    """A bit for each input that gradients reach from an autograd node; those of what lies behind are put down, too."""
    work = [root]
    while work:
        node = work[-1]
        behind = [] if is_users_function(node) else [item for item, _ in node.next_functions if item is not None]
        left = [item for item in behind if item not in masks]
        if left and node not in masks:
            work += left
            continue
        work.pop()
        place = places.get(node, places.get(id(getattr(node, "variable", None))))
        masks[node] = 0 if place is None else 1 << place
        for item in behind:
            masks[node] |= masks[item]
    return masks[root]
