"""Views of a graph as Inductor has them: where they lie in memory, and where `as_strided` reads.

Inductor keeps the order of an output's strides, not the strides themselves, where the output is a view: of rows of a
result it makes another tensor. It computes a part of a result in memory of its own, where `as_strided` of that part may
read beyond it. And what is written to a part of an input it writes to the input itself, be it that something else is
written there later, and backward or the caller needs what was there between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart
from memopt.program import base_of
from memopt.torch_compat.fake_tensors import is_dense

_AS_STRIDED = torch.ops.aten.as_strided.default
_WRITTEN_TO_PARTS = (
    torch.ops.aten.select_scatter, torch.ops.aten.slice_scatter, torch.ops.aten.diagonal_scatter,
    torch.ops.aten.as_strided_scatter, torch.ops.aten.index_put, torch.ops.aten.index_copy, torch.ops.aten.index_add,
    torch.ops.aten.scatter, torch.ops.aten.scatter_add, torch.ops.aten.scatter_reduce,
)  # fmt: skip
# What Inductor leaves out as nothing but a copy, alone or with what undoes it: its operand lies elsewhere.
_COPIES = (
    torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.copy, torch.ops.prims.convert_element_type,
)  # fmt: skip
# Inductor's mark of what is stored with the strides that it has in the graph.
STORED = "inductor_realize_to_strides"


def show_bases(graph: fx.Graph) -> None:
    """Have `as_strided` read the tensor that its operand is a view of."""
    for node in graph.find_nodes(op="call_function", target=_AS_STRIDED):
        given: Any = node.args[0]
        base = base_of(given)
        if base is not given:
            offset = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
            offset = given.meta["val"].storage_offset() if offset is None else offset
            node.args, node.kwargs = (base, node.args[1], node.args[2], offset), {}


def copy_bases(graph: fx.Graph) -> None:
    """Have `as_strided` read a copy where Inductor's passes would leave out the one that it reads.

    They do so before a step is planned and in each of its two graphs, and planning leaves out a copy of a copy between.
    """
    show_bases(graph)
    for node in graph.find_nodes(op="call_function", target=_AS_STRIDED):
        base: Any = node.args[0]
        if getattr(base.target, "overloadpacket", None) in _COPIES and not _shows_all(node, base):
            with graph.inserting_before(node):
                copied = graph.call_function(torch.ops.aten.lift_fresh_copy.default, (base,))
            copied.meta |= {**base.meta, "val": apart(base.meta["val"])}
            node.replace_input_with(base, copied)


def _shows_all(node: fx.Node, base: fx.Node) -> bool:
    """Whether `as_strided` shows what its operand does: so memopt's own rewrites have values stored."""
    shown, value = node.meta["val"], base.meta["val"]
    return bool(shown.shape == value.shape and shown.stride() == value.stride())


def as_it_lies(graph: fx.Graph) -> None:
    """Have a graph that is about to be lowered show what the model shows, and return it with the model's strides."""
    show_bases(graph)
    end = graph.output_node()
    outputs: Any = end.args[0]
    _keep_between(graph, outputs)
    seen = end.meta.get("user_visible_output_idxs", range(len(outputs)))
    for node in {outputs[place] for place in seen if isinstance(outputs[place], fx.Node)}:
        base = base_of(node)
        if base is not node and base.op == "call_function" and not _is_dense(node) and _is_dense(base):
            base.meta[STORED] = True


def _keep_between(graph: fx.Graph, outputs: Sequence[Any]) -> None:
    """Have what inputs hold between two writes be made of copies, where a graph returns it."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    last = {node.args[0]: node.args[1] for node in copies}
    for made in {base_of(output) for output in outputs if isinstance(output, fx.Node)}:
        written: Any = made
        while _writes_a_part(written):
            written = base_of(written.args[0])
        if written is made or written not in last or last[written] is made:
            continue
        source: Any = made.args[0]
        with graph.inserting_before(made):
            copied = graph.call_function(torch.ops.aten.lift_fresh_copy.default, (source,))
        copied.meta["val"] = apart(source.meta["val"])
        made.args = (copied, *made.args[1:])


def _writes_a_part(node: fx.Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _WRITTEN_TO_PARTS


def _is_dense(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and bool(is_dense(value))
