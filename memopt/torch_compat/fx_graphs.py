"""Graphs and their modules, made and edited as torch's own passes do; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx as make_fx

from memopt.torch_compat.patched import replaced


def lazy_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph whose code is written once it is called or asked for."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


def copy_node(graph: fx.Graph, node: fx.Node, resolve: Callable[[fx.Node], Any]) -> fx.Node:
    """Append a copy of a node, its metadata included, on what `resolve` gives for each operand.

    As `fx.Graph.node_copy` does, in a third of its time: what holds of the node's arguments is not checked again.
    """
    args, kwargs = fx.map_arg(node.args, resolve), fx.map_arg(node.kwargs, resolve)
    copied = graph.create_node(node.op, node.target, (), None, node.name, node.type)
    set_operands(copied, args, kwargs)
    copied.meta.update(node.meta)  # an assignment to an attribute of a node is a call in Python
    return copied


def unchecked_copies() -> contextlib.AbstractContextManager[None]:
    """Within: `fx.Graph.node_copy` is `copy_node`: torch's partitioners copy a joint graph several times."""
    return replaced(fx.Graph, "node_copy", _node_copy)


def _node_copy(graph: fx.Graph, node: fx.Node, arg_transform: Callable[[fx.Node], Any] = lambda node: node) -> fx.Node:
    return copy_node(graph, node, arg_transform)


def is_erased(node: fx.Node) -> bool:
    """Whether a node was erased from its graph."""
    return bool(node._erased)


def set_operands(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Give a new node operands, which are nodes already where they are: in half the time of an assignment."""
    both: Callable[..., None] | None = getattr(node, "_update_args_kwargs", None)
    if both is not None:
        both(args, kwargs)
    else:
        node.args, node.kwargs = args, dict(kwargs)
