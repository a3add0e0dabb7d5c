"""A joint graph with symbolic sizes as it is in one call: what plans and counts of bytes are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.graph.propagation import propagate
from memopt.program import copy_node, module_of
from memopt.torch_compat.operators import HigherOrderOperator
from memopt.torch_compat.symbols import SYMBOLIC, Sized, Sizes, UnknownSizeError

# Metadata of nodes that holds values with symbols.
_SYMBOLIC_META = ("val", "example_value", "tensor_meta", "eager_input_vals")


def at_sizes(joint: fx.GraphModule, sizes: Sizes) -> fx.GraphModule:
    """A copy of a joint graph with numbers in the place of what is computed of sizes; names of nodes are kept.

    Args:
        joint: as a partitioner receives it; it is not changed.
        sizes: what each symbol is.

    Raises:
        UnknownSizeError: a size is not known by these, or the graph calls another one.
    """
    graph, sized = fx.Graph(), Sized(sizes)
    mapping: dict[fx.Node, Any] = {}

    def resolve(node: fx.Node) -> Any:
        return mapping[node]

    for node in joint.graph.nodes:
        if node.op == "output":
            continue
        constant = node.op == "get_attr" and isinstance(getattr(joint, str(node.target), None), torch.Tensor)
        if isinstance(node.target, HigherOrderOperator) or (node.op == "get_attr" and not constant):
            raise UnknownSizeError(f"{node.target} calls a graph of its own")
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, (*SYMBOLIC, int, float, bool)):
            mapping[node] = sized(value)
            continue
        mapping[node] = copied = copy_node(graph, node, resolve)
        copied.args, copied.kwargs = _numbers(copied.args, sized), _numbers(copied.kwargs, sized)
        for name in () if constant else _SYMBOLIC_META:
            copied.meta.pop(name, None)
        if node.op == "placeholder":
            copied.meta["val"] = sized(value)
    last = joint.graph.output_node()
    result = graph.output(fx.map_arg(last.args[0], resolve))
    result.meta = dict(last.meta)
    found = module_of(joint, graph)
    propagate(found)
    return found


def _numbers(arguments: Any, sized: Sized) -> Any:
    """Arguments of a call with numbers in the place of symbols that no node computes."""
    return fx.node.map_aggregate(arguments, lambda item: sized(item) if isinstance(item, SYMBOLIC) else item)
