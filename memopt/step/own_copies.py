"""Inputs of a step that backward reads to recompute values, and copies of the small ones.

Eager's backward reads what autograd saved. A plan reads more: the operands of what it recomputes, a bias or the batch
among them, which the caller may write to between forward and backward. Of small ones forward keeps copies. The others
are looked at before backward runs (`memopt.step.backward_entry`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart
from memopt.memory.cost.roofline import result_bytes
from memopt.program import Phase, Program, base_of, shows_operand, tensors_of

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.lift_fresh_copy.default)
# Meta of a node of backward that recomputes a value of forward.
RECOMPUTED = "recomputed"
# Meta of a copy that forward makes for this: it has the value of its operand.
OWN_COPY = "own_copy"
# A copy is kept of a vector of up to so many bytes, and of what is at most such a part of what is recomputed of it.
_VECTOR, _PART = 2**16, 64


def recomputes(node: fx.Node) -> bool:
    """Whether a call of a backward graph recomputes a value of forward; views do not."""
    meta = node.meta
    again = RECOMPUTED in meta or meta.get("phase") is Phase.FORWARD
    return again and node.op == "call_function" and not shows_operand(node)


def is_copy_of_input(node: fx.Node) -> bool:
    """Whether a node is the user's own copy of an input, which may be written to from then on: a queue of keys, say."""
    if node.target not in _COPIES or not node.all_input_nodes:
        return False
    base = base_of(node.all_input_nodes[0])
    return base.op == "placeholder" and not base.name.startswith("tangents")


def recomputed_from(forward: fx.GraphModule, backward: fx.GraphModule) -> list[str]:
    """Names of the inputs of forward that backward reads to recompute values.

    Args:
        forward, backward: the two graphs of a step; what backward reads of forward goes by the same name.
    """
    made = {node.name: node for node in forward.graph.nodes}
    found: dict[str, None] = {}
    for node in backward.graph.nodes:
        for operand in node.all_input_nodes if recomputes(node) else ():
            shown = base_of(operand)
            base = base_of(made[shown.name]) if shown.op == "placeholder" and shown.name in made else None
            if base is not None and base.op == "placeholder":
                found[base.name] = None
    return list(found)


def shown_to_backward(program: Program) -> list[str]:
    """Names of the inputs of a step that forward reads through views, and backward reads.

    Eager saves the views, as of a linear layer's weight, which show what the input was when forward ran.
    """
    by_view, read = dict[str, None](), set[str]()
    for node in program.graph.nodes:
        if node.op != "call_function" or shows_operand(node):
            continue
        for operand in node.all_input_nodes:
            base = base_of(operand)
            if base.op != "placeholder":
                continue
            if node.meta.get("phase") is Phase.BACKWARD:
                read.add(base.name)
            elif operand is not base:
                by_view[base.name] = None
    return [name for name in by_view if name in read]


def copy_small_inputs(graph: fx.Graph, inputs: Collection[fx.Node]) -> None:
    """Have what backward recomputes of small inputs read copies that forward makes at its end.

    Args:
        graph: a joint graph in a plan's order, edited.
        inputs: the inputs that may be copied.
    """
    uses: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    first = None
    for node in graph.nodes:
        if node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD:
            first = first or node
            for operand in node.all_input_nodes if recomputes(node) else ():
                base = base_of(operand)
                if base in inputs:
                    uses.setdefault(base, []).append((node, operand))
    for base, found in uses.items():
        if first is not None and _is_small(base, [reader for reader, _ in found]):
            with graph.inserting_before(first):
                copied = graph.call_function(torch.ops.aten.clone.default, (base,))
            copied.meta = {"val": apart(base.meta["val"]), "phase": Phase.FORWARD, OWN_COPY: True}
            _read_instead(graph, base, copied, found)


def keep_small_inputs(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """The same for graphs that were cut without a plan, edited.

    Args:
        forward: the forward graph.
        backward: the backward graph; what it reads of forward goes by the same name.
        outputs: how many leading outputs of forward the caller gets.
    """
    made = {node.name: node for node in forward.graph.nodes}
    end = forward.graph.output_node()
    results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
    roles = list(end.meta.get("desc") or ())
    given = backward.graph.find_nodes(op="placeholder")
    names = {node.name: node for node in given}
    saved = [names[node.name] for node in results[outputs:] if isinstance(node, fx.Node) and node.name in names]
    where = saved[0] if saved else None
    uses: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    for node in backward.graph.nodes:
        for operand in node.all_input_nodes if recomputes(node) else ():
            shown = base_of(operand)
            if shown in saved and base_of(made[shown.name]).op == "placeholder":
                uses.setdefault(shown, []).append((node, operand))
    for shown, found in uses.items():
        source = made[shown.name]
        if where is None or not _is_small(shown, [reader for reader, _ in found]):
            continue
        with forward.graph.inserting_before(end):
            copied = forward.graph.create_node(
                "call_function", torch.ops.aten.clone.default, (source,), name=f"{shown.name}_kept"
            )
        copied.meta = {"val": apart(source.meta["val"]), "phase": Phase.FORWARD}
        with backward.graph.inserting_before(where):
            taken = backward.graph.placeholder(copied.name)
        taken.meta = dict(copied.meta)
        results.insert(outputs, copied)
        roles[outputs:outputs] = [None] if roles else []
        where = taken
        _read_instead(backward.graph, shown, taken, found)
        if not shown.users:
            place = results.index(source, outputs)
            del results[place], roles[place : place + 1]
            backward.graph.erase_node(shown)
    if roles:
        end.meta["desc"] = roles
    end.args = (tuple(results),)
    forward.recompile()
    backward.recompile()


def _read_instead(graph: fx.Graph, base: fx.Node, copied: fx.Node, uses: Sequence[tuple[fx.Node, fx.Node]]) -> None:
    """Have each reader read, in place of its operand, the same view of the copy."""
    for reader, operand in uses:
        with graph.inserting_before(reader):
            reader.replace_input_with(operand, _view_of(graph, operand, base, copied))


def _view_of(graph: fx.Graph, node: fx.Node, base: fx.Node, copied: fx.Node) -> fx.Node:
    if node is base:
        return copied
    first = node.all_input_nodes[0]
    made = graph.node_copy(node, lambda item: _view_of(graph, first, base, copied) if item is first else item)
    made.meta = {**node.meta, "phase": Phase.BACKWARD}
    return made


def _is_small(node: fx.Node, readers: Sequence[fx.Node]) -> bool:
    value: Any = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or not value.is_contiguous():
        return False
    sizes = [size for item in (node, *readers) for tensor in tensors_of(item) for size in tensor.shape]
    if not all(isinstance(size, int) for size in sizes):
        return False
    if value.numel() == max(value.shape, default=1) and value.nbytes <= _VECTOR:
        return True
    return _PART * int(value.nbytes) <= sum(result_bytes(reader) for reader in readers)
