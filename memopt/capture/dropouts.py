"""Dropouts that drop nothing: they return what they are given, which torch's capture takes for a copy.

A write to the result is a write to the operand, and both are one tensor for the caller.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

_DROPOUTS = (F.dropout, torch.dropout)
_NAMES = ("input", "p", "training", "inplace")


def without_idle_dropouts(graph_module: fx.GraphModule) -> None:
    """Take dropouts out of a graph of Dynamo's that are not training, or have a probability of 0."""
    idle = [node for node in graph_module.graph.nodes if node.target in _DROPOUTS and _is_idle(node)]
    for node in idle:
        node.replace_all_uses_with(_arguments(node)["input"])
        graph_module.graph.erase_node(node)
    if idle:
        graph_module.recompile()


def _is_idle(node: fx.Node) -> bool:
    given = _arguments(node)
    probability = given["p"]
    off = given["training"] is False or (isinstance(probability, int | float) and probability == 0)
    return off and isinstance(given["input"], fx.Node)


def _arguments(node: fx.Node) -> dict[str, Any]:
    given = {"input": None, "p": 0.5, "training": True, **dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
    return {**given, "training": given.get("train", given["training"])}
