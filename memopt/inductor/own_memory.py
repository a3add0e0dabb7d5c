"""Outputs that have memory of their own in a graph keep it where Inductor's passes leave operations out.

These make x of `x + 0` and of `x * 1`: an output would show an input, or another output, and a write to the one would
change the other.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart
from memopt.graph.rewrite import show_again
from memopt.inductor.strided_views import STORED
from memopt.program import base_of
from memopt.torch_compat.backward import input_of_gradient, role_of

# Inductor computes their operands where the result has them.
_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
_NOTED = "memopt: memory of outputs"  # in the metadata of a graph's end

# The name of the node that makes an output's memory, and how that lies.
_Memory = tuple[str, tuple[Any, Any] | None]


def note_memory(graph: fx.Graph) -> None:
    """Write down at the end of a graph which node makes the memory of each output of its forward."""
    noted: list[_Memory | None] = []
    for node in _outputs(graph):
        base = None if node is None else base_of(node)
        noted.append(None if base is None else (base.name, _layout(base)))
    graph.output_node().meta[_NOTED] = noted


def keep_memory(graph: fx.Graph) -> None:
    """Have copies made where outputs that had memory of their own by the note show an input or another output now."""
    noted: Sequence[_Memory | None] | None = graph.output_node().meta.pop(_NOTED, None)
    outputs = _outputs(graph)
    if noted is None or len(noted) != len(outputs):
        return
    owners: dict[fx.Node, str] = {}
    copies: dict[tuple[str, fx.Node], fx.Node] = {}
    results: list[Any] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    for place, (node, memory) in enumerate(zip(outputs, noted, strict=True)):
        if node is None or memory is None:
            continue
        base, (name, layout) = base_of(node), memory
        if owners.setdefault(base, base.name if base.op == "placeholder" else name) != name:
            results[place] = _shown_by_copy(graph, node, name, layout, copies)
    if copies:
        graph.output_node().args = (tuple(results),)


def keep_shared(graph: fx.Graph) -> None:
    """Have a graph that is about to be lowered store what several outputs show, where Inductor has no memory for it.

    It takes what is assigned to all of a tensor for a view of what was assigned, and makes each output anew of that.
    """
    values = [value for value in _values(graph) if isinstance(value, fx.Node)]
    shown = collections.Counter(base_of(value) for value in dict.fromkeys(values))
    for base in [base for base, count in shown.items() if count > 1 and base.target is torch.ops.aten.copy.default]:
        with graph.inserting_after(base):
            stored = graph.call_function(torch.ops.aten.clone.default, (base,))
        stored.meta |= {"val": apart(base.meta["val"]), STORED: True}
        base.replace_all_uses_with(stored, lambda user, here=stored: user is not here)  # type: ignore[misc]


def keep_operands(graph: fx.Graph) -> None:
    """Have a graph that is about to be lowered concatenate copies of what it returns beside the concatenation.

    Unless the caller sees neither of the two: what is saved for backward alone is not written to.
    """
    values = _values(graph)
    returned = {base_of(value) for value in values if isinstance(value, fx.Node)}
    places = graph.output_node().meta.get("user_visible_output_idxs", range(len(values)))
    seen = {base_of(values[place]) for place in places if isinstance(values[place], fx.Node)}
    for node in [node for join in _JOINS for node in graph.find_nodes(op="call_function", target=join)]:
        if node not in returned:
            continue
        for operand in node.all_input_nodes:
            base = base_of(operand)
            if base.op == "placeholder" or base not in returned or not {base, node} & seen:
                continue
            with graph.inserting_before(node):
                copied = graph.call_function(torch.ops.aten.clone.default, (operand,))
            copied.meta["val"] = apart(operand.meta["val"])
            node.replace_input_with(operand, copied)


def _shown_by_copy(
    graph: fx.Graph, node: fx.Node, name: str, layout: Any, copies: dict[tuple[str, fx.Node], fx.Node]
) -> fx.Node:
    """What a node shows, of a copy of what lies as the memory did that it showed."""
    chain = [node]
    while chain[0] is not base_of(node):
        chain.insert(0, chain[0].all_input_nodes[0])
    start = next((index for index, view in reversed(list(enumerate(chain))) if _layout(view) == layout), len(chain) - 1)
    source = chain[start]
    if (name, source) not in copies:
        with graph.inserting_before(graph.output_node()):
            copied = graph.call_function(torch.ops.aten.lift_fresh_copy.default, (source,))
        copied.meta = {**source.meta, "val": apart(source.meta["val"])}
        copies[name, source] = copied
    with graph.inserting_before(graph.output_node()):
        return show_again(graph, chain[start:], copies[name, source])


def _values(graph: fx.Graph) -> list[Any]:
    values: Any = graph.output_node().args[0]
    return list(values) if isinstance(values, list | tuple) else [values]


def _outputs(graph: fx.Graph) -> list[fx.Node | None]:
    """The outputs that are tensors; None for others, and for gradients."""
    end = graph.output_node()
    values: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    roles = role_of(end) or [None] * len(values)
    return [
        value if isinstance(value, fx.Node) and input_of_gradient(role) < 0 and _is_tensor(value) else None
        for value, role in zip(values, roles, strict=True)
    ]


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _layout(node: fx.Node) -> tuple[Any, Any] | None:
    value = node.meta.get("val")
    return (value.size(), value.stride()) if isinstance(value, torch.Tensor) else None
