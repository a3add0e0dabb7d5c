"""Reading an ONNX graph: constants, attributes, types, users, and which operators may be evaluated or merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

# Operators that draw random numbers. Dropout and BatchNormalization draw or update only in training mode.
RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}

_CONSTANT_ATTRIBUTES = {
    "value_float": np.float32,
    "value_floats": np.float32,
    "value_int": np.int64,
    "value_ints": np.int64,
}


def opset(model: ir.Model) -> int:
    """The version of the standard operator set that the model imports; 0 when it imports none."""
    imports = model.graph.opset_imports
    return int(imports.get("", 0) or 0)


def is_standard(node: ir.Node, *op_types: str) -> bool:
    """Whether the node is a standard operator, and of one of these types where any are given."""
    return node.domain == "" and not node.overload and (not op_types or node.op_type in op_types)


def constant(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """The value's tensor when it is the same at every call; None otherwise.

    An initializer that is also a graph input is only a default, which a caller may override: no constant.
    """
    if value is None or value.is_graph_input():
        return None
    if value.is_initializer():
        return None if value.const_value is None else value.const_value.numpy()
    node = value.producer()
    if node is None or not is_standard(node, "Constant") or len(node.attributes) != 1:
        return None
    (attribute,) = node.attributes.values()
    if attribute.is_ref():
        return None
    if attribute.name == "value":
        return np.asarray(attribute.as_tensor().numpy())
    dtype = _CONSTANT_ATTRIBUTES.get(attribute.name)
    return None if dtype is None else np.asarray(attribute.value, dtype=dtype)


def scalar(value: ir.Value | None) -> float | None:
    """The number that a constant of one element holds; None otherwise."""
    array = constant(value)
    if array is None or array.size != 1 or array.dtype.kind in "OSUb":
        return None
    return float(array.reshape(()))


def attribute(node: ir.Node, name: str, default: Any) -> Any:
    """The attribute's value, or the default where the node has none."""
    found = node.attributes.get(name)
    if found is None:
        return default
    value = found.value
    return value.decode() if isinstance(value, bytes) else value


def integers(node: ir.Node, name: str, index: int) -> list[int] | None:
    """A list of integers that is an attribute in old operator sets and an input in new ones; None when absent.

    Raises:
        ValueError: it is an input that is computed.
    """
    if name in node.attributes:
        found = attribute(node, name, None)
        return [int(item) for item in (found if isinstance(found, (tuple, list)) else [found])]
    value = argument(node, index)
    if value is None:
        return None
    array = constant(value)
    if array is None:
        raise ValueError(f"{name} is computed")
    return [int(item) for item in array.reshape(-1)]


def argument(node: ir.Node, index: int) -> ir.Value | None:
    """The input at this position; None when it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def result(node: ir.Node, index: int = 0) -> ir.Value | None:
    """The output at this position; None when it is left out (its name is empty)."""
    if index >= len(node.outputs) or not node.outputs[index].name:
        return None
    return node.outputs[index]


def dims(value: ir.Value | None) -> list[int | None] | None:
    """The inferred dimensions, None for each one that is not fixed; None when the rank is unknown.

    What a model claims of its outputs is not believed; what it declares of its inputs is checked by every engine.
    """
    if value is None:
        return None
    if value.is_initializer() and not value.is_graph_input() and value.const_value is not None:
        return [int(item) for item in value.const_value.shape.numpy()]
    produced = value.is_graph_output() and not value.is_graph_input()
    shape = value.meta.get(INFERRED) if produced else value.shape
    if shape is None:
        return None
    return [item if isinstance(item, int) else None for item in shape]


def static_shape(value: ir.Value | None) -> list[int] | None:
    """The inferred shape when every dimension is fixed; None otherwise."""
    found = dims(value)
    if found is None or any(item is None for item in found):
        return None
    return [int(item) for item in found if item is not None]


INFERRED = "memopt.shape"


def only_user(value: ir.Value | None) -> ir.Node | None:
    """The single node that reads the value, once; None when several do, or the value leaves its graph."""
    if value is None or value.is_graph_output():
        return None
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 else None


def producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The standard node of one of these types that makes the value; None otherwise."""
    node = None if value is None else value.producer()
    return node if node is not None and is_standard(node, *op_types) else None


def has_subgraphs(node: ir.Node) -> bool:
    """Whether the node holds graphs (If, Loop, Scan)."""
    kinds = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return any(item.type in kinds for item in node.attributes.values())


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs that the node holds."""
    found: list[ir.Graph] = []
    for item in node.attributes.values():
        if item.is_ref():
            continue
        if item.type is ir.AttributeType.GRAPH:
            found.append(item.as_graph())
        elif item.type is ir.AttributeType.GRAPHS:
            found.extend(item.as_graphs())
    return found


def is_random(node: ir.Node, version: int) -> bool:
    """Whether two runs of the node may differ: it must be neither evaluated nor merged. `version`: see `opset`."""
    if node.op_type in RANDOM:
        return True
    if node.op_type == "Dropout":
        return not dropout_is_off(node, version)
    return any(is_random(inner, version) for graph in subgraphs(node) for inner in graph)


def dropout_is_off(node: ir.Node, version: int) -> bool:
    """Whether a Dropout node passes its input on; `version` is the operator set's."""
    if version < 7:
        return bool(attribute(node, "is_test", 0))
    mode = argument(node, 2) if version >= 12 else None
    return mode is None or scalar_bool(mode) is False


def scalar_bool(value: ir.Value) -> bool | None:
    """The truth value of a constant; None when it is computed."""
    array = constant(value)
    return None if array is None or array.size != 1 else bool(array.reshape(()))


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and every graph inside it; functions are left out: their attributes are not bound."""
    yield model.graph
    yield from model.graph.subgraphs()


def label(node: ir.Node) -> str:
    """The node's name in reports: its own, else its first output's."""
    outputs = [value.name for value in node.outputs if value.name]
    return node.name or (outputs[0] if outputs else None) or node.op_type or "unnamed"


def bytes_of(value: ir.Value) -> int:
    """What the value's tensor takes in a file."""
    return 0 if value.const_value is None else int(value.const_value.nbytes)


def weight_bytes(model: ir.Model) -> int:
    """Bytes of all initializers of the model, those of graphs inside it too."""
    return sum(bytes_of(value) for graph in graphs(model) for value in graph.initializers.values())
