"""Compute shapes beforehand, or once: what exporters write between a Shape and a Reshape mostly goes."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import onnx_ir as ir

from memopt.onnx.edit import Edit
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import argument, attribute, constant, is_standard, label, producer
from memopt.onnx.symbolic import Dim, Symbols


class SimplifyShapes(OnnxPass):
    """Replace computed shapes by what `memopt.onnx.symbolic` knows of them; the main graph only.

    Cases:
        1. A Reshape to a computed shape: each size that is fixed is written as a number, one that the input has at that
           place as 0 (copy), and one at most as -1. Where that covers all, the shape is a constant.
        2. An Expand or a Reshape to the shape that its input has goes.
        3. An integer tensor whose items are all fixed becomes a constant (a Gather of a fixed axis from a Shape).
        4. An integer tensor that holds what an earlier one holds is that one.
        5. Reshape to three axes, Transpose of the last two, Reshape back, which is how exporters turn the keys of an
           attention: a Transpose of the last two axes.

    Refusals:
        - A Reshape to a shape with two or more sizes that are neither fixed nor the input's own at their place.
    """

    name: ClassVar[str] = "simplify_shapes"

    def rewrite(self, edit: Edit) -> None:
        """Walk the main graph in order."""
        symbols = Symbols(edit.model)
        graph = edit.model.graph
        seen: dict[tuple[object, ...], ir.Value] = {}
        for node in list(graph):
            if node.graph is None or not is_standard(node):
                continue
            if node.op_type in ("Expand", "Reshape") and _same(edit, node, symbols):
                continue
            if node.op_type == "Reshape" and _batched_transpose(edit, node, symbols):
                continue
            if node.op_type == "Reshape":
                _reshape(edit, node, symbols)
            for value in node.outputs:
                _integers(edit, node, value, symbols, seen)


def _same(edit: Edit, node: ir.Node, symbols: Symbols) -> bool:
    source, value = node.inputs[0], node.outputs[0]
    if source is None or source not in symbols.shapes or symbols.shapes[source] != symbols.shapes.get(value):
        return False
    if not edit.can_replace(value, source):
        return False
    name = label(node)
    edit.replace(value, source)
    edit.erase(node)
    edit.change(f"{node.op_type} {name} keeps the shape of {source.name}", (name,), (str(source.name),))
    return True


def _batched_transpose(edit: Edit, node: ir.Node, symbols: Symbols) -> bool:
    turned = producer(node.inputs[0], "Transpose")
    flat = producer(turned.inputs[0], "Reshape") if turned is not None else None
    if turned is None or flat is None or tuple(attribute(turned, "perm", ())) != (0, 2, 1):
        return False
    source = flat.inputs[0]
    shapes = [symbols.shapes.get(value) for value in (source, flat.outputs[0], node.outputs[0]) if value is not None]
    if len(shapes) != 3 or any(shape is None for shape in shapes):
        return False
    given, three, back = (shape for shape in shapes if shape is not None)
    if len(given) < 4 or three[1:] != given[-2:] or back != (*given[:-2], given[-1], given[-2]):
        return False
    names = (label(flat), label(turned), label(node))
    order = [*range(len(given) - 2), len(given) - 1, len(given) - 2]
    new = edit.node(node, "Transpose", [source], {"perm": order}, stem=f"{names[1]}_batched")
    edit.replace(node.outputs[0], new.outputs[0])
    edit.erase(node)
    symbols.shapes[new.outputs[0]] = back
    edit.change(f"{', '.join(names)} are one Transpose", names, (label(new),))
    return True


def _reshape(edit: Edit, node: ir.Node, symbols: Symbols) -> None:
    source, target = argument(node, 0), argument(node, 1)
    if source is None or target is None or constant(target) is not None:
        return
    sizes = symbols.data.get(target)
    if sizes is None:
        return
    # The shape of the result says more: there a -1 is counted out.
    made = symbols.shapes.get(node.outputs[0], sizes)
    written = _written(made if len(made) == len(sizes) else sizes, symbols.shapes.get(source))
    if written is None:
        edit.refuse(node, f"its shape {list(sizes)} has two sizes that are neither fixed nor its input's own")
        return
    graph = node.graph
    assert graph is not None
    name = label(node)
    node.replace_input_with(1, edit.initializer(graph, f"{name}_shape", np.asarray(written, dtype=np.int64)))
    if "allowzero" in node.attributes:
        del node.attributes["allowzero"]
    made_by = target.producer()
    if made_by is not None:
        edit.erase(made_by)
    edit.change(f"the shape of {name} is {written}", (name,), (name,))


def _written(sizes: tuple[Dim, ...], source: tuple[Dim, ...] | None) -> list[int] | None:
    found: list[int] = []
    for index, size in enumerate(sizes):
        if size.is_Integer and size > 0:
            found.append(int(size))
        elif source is not None and index < len(source) and size == source[index]:
            found.append(0)
        elif -1 in found or size == 0:
            return None
        else:
            found.append(-1)
    return found


def _integers(
    edit: Edit, node: ir.Node, value: ir.Value, symbols: Symbols, seen: dict[tuple[object, ...], ir.Value]
) -> None:
    data = symbols.data.get(value)
    if data is None or is_standard(node, "Constant") or value.is_graph_output() or node.graph is None:
        return
    if not value.uses():
        return
    name = label(node)
    if all(item.is_Integer for item in data):
        assert value.dtype is not None
        array = np.asarray([int(item) for item in data], dtype=value.dtype.numpy())
        array = array.reshape([int(dim) for dim in symbols.shapes[value]])
        fixed = edit.initializer(node.graph, f"{value.name}_fixed", array)
        edit.replace(value, fixed)
        edit.erase(node)
        edit.change(f"{name} is {array.tolist()}", (name,), (str(fixed.name),))
        return
    key = (value.dtype, symbols.shapes.get(value), data)
    first = seen.setdefault(key, value)
    made = first.producer()
    if made is not None and made.graph is None:  # it went with what read it
        seen[key] = first = value
    if first is not value and edit.can_replace(value, first):
        edit.replace(value, first)
        edit.erase(node)
        edit.change(f"{name} holds what {first.name} holds", (name,), (str(first.name),))
