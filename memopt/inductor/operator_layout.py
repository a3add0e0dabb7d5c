"""Results of operators that Inductor writes out in simpler ones: they lie as the operator's own.

A batch norm's result on a CPU is contiguous, whatever its operand is; of the sums and products that Inductor writes in
its place the result lies as the operand. What is returned, or read by `as_strided`, would be laid out otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart
from memopt.program import copy_node, module_of
from memopt.torch_compat.decomposed import decomposed


def as_operators_lie(module: fx.GraphModule) -> fx.GraphModule:
    """A graph whose results lie as they do in it when Inductor has written out the operators; the same if they do."""
    copied = [node for call in module.graph.nodes if _may_differ(call) for node in _laid_out_anew(call)]
    if not copied:
        return module
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        made[node] = result = copy_node(graph, node, made.__getitem__)
        if node in copied:
            made[node] = graph.call_function(
                torch.ops.aten.clone.default, (result,), {"memory_format": torch.contiguous_format}
            )
            made[node].meta["val"] = apart(node.meta["val"])
    return module_of(module, graph)


def _may_differ(node: fx.Node) -> bool:
    """Whether an operator reads what is not contiguous, and makes what is."""
    return (
        node.op == "call_function"
        and any(not _is_contiguous(item.meta.get("val")) for item in node.all_input_nodes)
        and any(_is_contiguous(value) for value in _values(node.meta.get("val")))
    )


def _laid_out_anew(node: fx.Node) -> list[fx.Node]:
    """The node, or its results, that are contiguous and would not be."""
    found = decomposed(node)
    if found is None:
        return []
    if isinstance(node.meta["val"], torch.Tensor):
        return [node] if _is_contiguous(node.meta["val"]) and not _is_contiguous(found) else []
    places = [
        place
        for place, (value, other) in enumerate(zip(node.meta["val"], _values(found), strict=False))
        if isinstance(value, torch.Tensor) and _is_contiguous(value) and not _is_contiguous(other)
    ]
    return [user for user in node.users if user.target is operator.getitem and user.args[1] in places]


def _values(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _is_contiguous(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_contiguous()
