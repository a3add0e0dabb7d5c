"""Finding expressions in a graph: patterns of operators, numbers and names, sums and products in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from memopt.onnx.read import constant, is_standard, label

# A pattern is a name (any value, the same wherever the name stands), a number (a constant that rounds to it), or a
# tuple of an operator and the patterns of its inputs. A tuple of operators in place of one stands for any of them.
Pattern = Any

_COMMUTATIVE = {"Add", "Mul"}


@dataclasses.dataclass(frozen=True)
class Match:
    """What a pattern stands for: the values by name, and the nodes, the last one first."""

    values: dict[str, ir.Value]
    nodes: tuple[ir.Node, ...]

    def outside_user(self) -> ir.Node | None:
        """A node inside whose result is also read outside, or is an output; None when there is none."""
        inside = set(self.nodes)
        for node in self.nodes[1:]:
            for value in node.outputs:
                if value.is_graph_output() or any(use.node not in inside for use in value.uses()):
                    return node
        return None

    def names(self) -> tuple[str, ...]:
        """The nodes' names in the order of the graph."""
        return tuple(label(node) for node in reversed(self.nodes))


def find(node: ir.Node, patterns: Iterable[Pattern]) -> Match | None:
    """The first pattern that the node's first result matches."""
    for pattern in patterns:
        values: dict[str, ir.Value] = {}
        nodes: dict[ir.Node, None] = {}
        if node.outputs and _matches(node.outputs[0], pattern, values, nodes):
            return Match(values, tuple(nodes))
    return None


def is_number(value: ir.Value, number: float) -> bool:
    """Whether the value is a constant of one element that rounds to this number in its own type."""
    array = constant(value)
    if array is None or array.size != 1 or (array.dtype.kind not in "fiu" and array.dtype.name != "bfloat16"):
        return False
    found = float(array.reshape(()))
    if array.dtype.kind in "iu":
        return found == number
    near = float(np.asarray(number).astype(array.dtype))
    # Exporters round a number to float32 before they round it to the type of the graph.
    return abs(found - near) <= 2 * abs(near) * float(_epsilon(array.dtype))


def _epsilon(dtype: np.dtype[Any]) -> float:
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def _matches(value: ir.Value | None, pattern: Pattern, values: dict[str, ir.Value], nodes: dict[ir.Node, None]) -> bool:
    if value is None:
        return False
    if isinstance(pattern, str):
        return values.setdefault(pattern, value) is value
    if isinstance(pattern, (int, float)):
        return is_number(value, float(pattern))
    operators, inputs = pattern[0], pattern[1:]
    node = value.producer()
    wanted = operators if isinstance(operators, tuple) else (operators,)
    if node is None or not is_standard(node, *wanted) or len(node.inputs) < len(inputs) or value.index() != 0:
        return False
    orders: list[Sequence[Any]] = [inputs]
    if node.op_type in _COMMUTATIVE and len(inputs) == 2:
        orders.append(inputs[::-1])
    for order in orders:
        tried_values, tried_nodes = dict(values), {**nodes, node: None}
        if all(
            _matches(given, part, tried_values, tried_nodes) for given, part in zip(node.inputs, order, strict=False)
        ):
            values.clear()
            values.update(tried_values)
            nodes.clear()
            nodes.update(tried_nodes)
            return True
    return False
