"""Evaluate what is the same at every call, without letting the file grow."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from memopt.onnx.constants import evaluated
from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import attribute, bytes_of, constant, is_standard, label

Array = np.ndarray[Any, Any]

# What a node takes in a file beside its names, about.
_NODE_BYTES = 24


class FoldConstants(OnnxPass):
    """Replace what depends on constants alone by its value.

    Cases:
        1. A Constant node becomes an initializer, bit for bit.
        2. Shape of a value whose dimensions (those asked for) are fixed by inference; Size likewise.
        3. A node whose inputs are all constants, and chains of such nodes.

    Bounded growth: a chain is replaced by its value only where the value takes no more bytes than what goes with it:
    the nodes, and the constants that only they read. Otherwise the value stays computed, and what it is computed from
    is folded if that fits (an Expand stays, the arithmetic of its shape goes). `growth` allows that many bytes more.

    Each node is evaluated by ONNX Runtime and by the reference evaluator.

    Refusals:
        - The two differ by more than rounding; only one of them knows an operator that does arithmetic; neither does.
        - The value would be larger than what it replaces, larger than 256 MiB, or of a size not known beforehand.
        - The node draws random numbers, holds graphs, is of another domain, makes no tensor, or is quantization.
        - An input is an initializer that a caller may override.
    """

    name: ClassVar[str] = "fold_constants"
    # An engine may run another kernel where an operand is a constant: its sums then run in another order.
    tolerance: ClassVar[float] = 4.0

    def __init__(self, growth: int = 0) -> None:
        """Allow the constants to grow by `growth` bytes in all."""
        self.growth = growth

    def rewrite(self, edit: Edit) -> None:
        """Lift constants, evaluate all that can be in order, then write what fits, last node first."""
        for graph in edit.graphs():
            _lift(edit, graph)
        known = evaluated(edit.model, edit.refuse)
        balance = self.growth
        for graph in edit.graphs():
            for node in reversed(list(graph)):
                if node.graph is not None and any(value in known for value in node.outputs):
                    balance = _write(edit, node, known, balance)


def _lift(edit: Edit, graph: ir.Graph) -> None:
    for node in list(graph):
        value = node.outputs[0] if is_standard(node, "Constant") else None
        array = constant(value)
        if value is None or array is None or value.is_graph_output():
            continue
        tensor = attribute(node, "value", None)
        initializer = edit.initializer(graph, str(value.name), array, None if tensor is None else tensor.dtype)
        name = label(node)
        edit.replace(value, initializer)
        edit.erase(node)
        edit.change(f"{name} is the initializer {initializer.name}", (name,), (str(initializer.name),))


def _write(edit: Edit, node: ir.Node, known: dict[ir.Value, Array], balance: int) -> int:
    """Replace the node by its values if they fit; return what growth is left."""
    needed = [value for value in node.outputs if value.uses() or value.is_graph_output()]
    if not needed:
        return balance  # it went with a node after it, or is dead, which is another pass's affair
    if any(value not in known for value in needed):
        return balance
    if any(value.is_graph_output() for value in needed):
        edit.refuse(node, "its result is an output, which has to be made by a node")
        return balance
    cost = sum(int(known[value].nbytes) + _NODE_BYTES for value in needed)
    saved = _freed(node)
    if cost > saved + max(balance, 0):
        edit.refuse(node, f"its value takes {cost} bytes, {saved} go with it")
        return balance
    graph = node.graph
    assert graph is not None
    name, after = label(node), []
    for value in needed:
        array = known[value]
        initializer = edit.initializer(graph, f"{value.name}_value", array, value.dtype)
        edit.replace(value, initializer)
        after.append(str(initializer.name))
    edit.erase(node)
    edit.change(f"{name} is evaluated: {cost} bytes for {saved}", (name,), after)
    return balance + min(saved - cost, 0)


def _freed(node: ir.Node) -> int:
    """Bytes of the nodes and initializers that go when nothing reads the node's results any more."""
    gone: set[ir.Node] = {node}
    work: list[ir.Node] = [node]
    freed = 0
    tensors: set[ir.Value] = set()
    while work:
        item = work.pop()
        freed += _node_bytes(item)
        for value in item.inputs:
            if value is None or value in tensors or value.is_graph_output():
                continue
            if any(use.node not in gone for use in value.uses()):
                continue
            made = value.producer()
            if value.is_initializer() and not value.is_graph_input():
                tensors.add(value)
                freed += bytes_of(value) + _NODE_BYTES
            elif made is not None and made not in gone and _all_gone(made.outputs, gone):
                gone.add(made)
                work.append(made)
    return freed


def _all_gone(values: Iterable[ir.Value], gone: set[ir.Node]) -> bool:
    return all(not value.is_graph_output() and all(use.node in gone for use in value.uses()) for value in values)


def _node_bytes(node: ir.Node) -> int:
    names = [node.name or "", node.op_type, *(str(v.name) for v in (*node.inputs, *node.outputs) if v is not None)]
    return _NODE_BYTES + sum(len(name) + 2 for name in names)
