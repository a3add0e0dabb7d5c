"""Keep one copy of equal constants."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from memopt.onnx.edit import Edit, drop_initializer
from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.read import bytes_of


class ShareInitializers(OnnxPass):
    """Keep one copy of initializers that are equal bit for bit: same type, same shape, same bytes.

    An initializer is replaced by an equal one of its own graph or of a graph around it. Equality is decided by bytes,
    so that 0.0 and -0.0, or two kinds of NaN, stay apart; a digest only finds the candidates.

    Refusals:
        - The initializer is an input of a graph too: a caller may override it.
        - It is an output of a graph: its name has to stay.
    """

    name: ClassVar[str] = "share_initializers"

    def rewrite(self, edit: Edit) -> None:
        """Walk the graphs from the outermost inwards."""
        _share(edit, edit.model.graph, {})


_Known = dict[tuple[object, ...], list[ir.Value]]


def _share(edit: Edit, graph: ir.Graph, outer: _Known) -> None:
    known: _Known = {key: list(values) for key, values in outer.items()}
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None:
            continue
        fixed = value.is_graph_input() or value.is_graph_output()
        key = (tensor.dtype, tuple(tensor.shape.numpy()), _digest(tensor))
        twin = next((item for item in known.get(key, ()) if _equal(item, value)), None)
        if twin is None:
            if not value.is_graph_input():
                known.setdefault(key, []).append(value)
        elif fixed:
            reason = "it is an input, which a caller may override" if value.is_graph_input() else "it is an output"
            edit.refuse(str(value.name), f"equals {twin.name}, but {reason}")
        else:
            edit.replace(value, twin)
            size = bytes_of(value)
            drop_initializer(value)
            edit.change(f"{value.name} is {twin.name}: {size} bytes less", (str(value.name),), (str(twin.name),))
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type is ir.AttributeType.GRAPH:
                _share(edit, attribute.as_graph(), known)
            elif attribute.type is ir.AttributeType.GRAPHS:
                for inner in attribute.as_graphs():
                    _share(edit, inner, known)


def _digest(tensor: ir.TensorProtocol) -> bytes:
    if tensor.dtype is ir.DataType.STRING:
        return hashlib.blake2b(repr(tensor.numpy().tolist()).encode()).digest()
    return hashlib.blake2b(_bits(tensor).data).digest()


def _equal(a: ir.Value, b: ir.Value) -> bool:
    assert a.const_value is not None and b.const_value is not None
    if a.const_value.dtype is ir.DataType.STRING:
        return bool(a.const_value.numpy().tolist() == b.const_value.numpy().tolist())
    return bool(np.array_equal(_bits(a.const_value), _bits(b.const_value)))


def _bits(tensor: ir.TensorProtocol) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The tensor's bytes, not copied."""
    return np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8)
