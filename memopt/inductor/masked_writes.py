"""What is assigned where a mask is true is a choice of two values, which Inductor then never writes in place.

It lowers such an assignment in place to memory that has been written to in part, and reads there what had been before
that: `a = zeros(4, 4); a.diagonal().copy_(x); a[mask] = 0` loses the diagonal (torch 2.11 and 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart


def choose_by_masks(graph: fx.Graph) -> None:
    """Have a graph that is about to be lowered choose by a mask where it writes a number by one."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default):
        written, indices, value, *rest = node.args
        if any(rest) or any(node.kwargs.values()) or len(indices) != 1 or not _is_chosen(written, indices[0], value):
            continue
        mask = indices[0]
        with graph.inserting_before(node):
            if missing := written.meta["val"].ndim - mask.meta["val"].ndim:
                mask = _call(graph, torch.ops.aten.reshape.default, mask, [*mask.meta["val"].shape, *[1] * missing])
            if value.meta["val"].device != written.meta["val"].device:  # a number that was assigned is on the CPU
                value = _call(graph, torch.ops.prims.device_put.default, value, written.meta["val"].device)
            if value.meta["val"].ndim:
                value = _call(graph, torch.ops.aten.reshape.default, value, [])
            chosen = _call(graph, torch.ops.aten.where.self, mask, value, written)
        chosen.meta = {**node.meta, "val": apart(node.meta["val"])}
        node.replace_all_uses_with(chosen)
        graph.erase_node(node)


def _is_chosen(written: Any, mask: Any, value: Any) -> bool:
    if not all(isinstance(item, fx.Node) for item in (written, mask, value)):
        return False
    self, where, number = (item.meta.get("val") for item in (written, mask, value))
    return (
        all(isinstance(item, torch.Tensor) for item in (self, where, number))
        and where.dtype is torch.bool
        and 0 < where.ndim <= self.ndim
        and number.numel() == 1
        and number.dtype is self.dtype
        and where.device == self.device
        and written.op == "call_function"
    )


def _call(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda given: given.meta["val"]))
    return node
