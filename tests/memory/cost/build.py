"""Graphs of one call, and operators to put into them."""

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

aten = torch.ops.aten
GEOMETRY = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def call(target, *args, **kwargs):
    """A graph of one call; tensors among the arguments become placeholders."""
    graph, mode, nodes = fx.Graph(), FakeTensorMode(), {}

    def place(value):
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in nodes:
            nodes[id(value)] = graph.placeholder(f"x{len(nodes)}")
            nodes[id(value)].meta["val"] = mode.from_tensor(value)
        return nodes[id(value)]

    args, kwargs = pytree.tree_map(place, (args, kwargs))
    node = graph.call_function(target, args, kwargs)
    with mode, torch.no_grad():
        found, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        node.meta["val"] = target(*found, **named)
    return node
