"""One node on known inputs, by two engines that have to agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from memopt.errors import first_line
from memopt.graph.rewrite import Refused
from memopt.onnx.engines import Engine, EngineError, OnnxRuntime, Reference
from memopt.onnx.evidence import OnnxEvidenceError, difference, is_floating, ulp_of

Array = np.ndarray[Any, Any]

# Operators that move or repeat values without arithmetic: one engine suffices.
MOVES = {
    "Concat", "ConstantOfShape", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
    "ScatterElements", "ScatterND", "Shape", "Size", "Slice", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    "Where",
}  # fmt: skip
# Two engines may differ by this many units in the last place of the largest value.
_AGREE_ULP = 16


def evaluate(node: ir.Node, inputs: Sequence[Array | None], version: int, limit: int) -> list[Array | None]:
    """The node's results on these inputs, one per output; None where the output has no name.

    Args:
        version: the standard operator set's.
        limit: the most bytes that the results may take together.

    Raises:
        Refused: the results would be larger, no engine runs the node, or two engines disagree.
    """
    shapes, proto = _single(node, inputs, version)
    for name, shape, size in shapes:
        if shape is None:
            raise Refused(f"the size of {name} is not known beforehand")
        if int(np.prod(shape, dtype=object)) * size > limit:
            raise Refused(f"{name} would take {int(np.prod(shape, dtype=object)) * size} bytes")
    feeds = {f"i{index}": array for index, array in enumerate(inputs) if array is not None}
    found: list[list[Array]] = []
    reasons: list[str] = []
    for load in (OnnxRuntime, Reference):
        try:
            engine: Engine = load(ir.from_proto(proto))
            found.append([np.asarray(value) for value in engine.run(feeds)])
        except EngineError as error:
            reasons.append(f"{load.name}: {error}")
    if not found:
        raise Refused(f"it cannot be evaluated ({reasons[0]})")
    if len(found) == 1 and node.op_type not in MOVES:
        raise Refused(f"only one engine evaluates it ({reasons[0]})")
    if len(found) == 2:
        _agree(found[0], found[1])
    values = iter(found[0])
    return [next(values) if output.name else None for output in node.outputs]


def _single(
    node: ir.Node, inputs: Sequence[Array | None], version: int
) -> tuple[list[tuple[str, list[int] | None, int]], onnx.ModelProto]:
    """A model of this node alone, and the inferred shape and item size of each of its results."""
    attributes = list(node.attributes.values())
    given = [None if array is None else ir.Value(name=f"i{k}") for k, array in enumerate(inputs)]
    for value, array in zip(given, inputs, strict=True):
        if value is not None and array is not None:
            try:
                dtype = ir.DataType.STRING if array.dtype.kind in "OSU" else ir.DataType.from_numpy(array.dtype)
            except TypeError as error:
                raise Refused(f"it reads {array.dtype}") from error
            value.type, value.shape = ir.TensorType(dtype), ir.Shape(array.shape)
    outputs = [ir.Value(name=f"o{k}" if output.name else "") for k, output in enumerate(node.outputs)]
    copy = ir.Node(node.domain, node.op_type, given, attributes, outputs=outputs)
    named = [value for value in outputs if value.name]
    graph = ir.Graph([v for v in given if v is not None], [], nodes=[copy], opset_imports={"": version}, name="node")
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    proto.graph.output.extend(onnx.ValueInfoProto(name=value.name) for value in named)
    types = _infer(proto, [np.zeros(0) if a is None else a for a in inputs], version)
    shapes: list[tuple[str, list[int] | None, int]] = []
    names = [str(output.name) for output in node.outputs if output.name]
    for name, value, output in zip(names, named, proto.graph.output, strict=True):
        kind = types.get(str(value.name))
        if kind is None or kind.WhichOneof("value") != "tensor_type":
            raise Refused("the type of its result is not known")
        output.type.CopyFrom(kind)
        tensor = kind.tensor_type
        known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
        size = max(int(ir.DataType(tensor.elem_type).itemsize), 1) if tensor.elem_type != onnx.TensorProto.STRING else 8
        shapes.append((name, [dim.dim_value for dim in tensor.shape.dim] if known else None, size))
        output.type.tensor_type.ClearField("shape")
    return shapes, proto


# Inputs above this size are never shapes, axes or counts, which the inference reads.
_DATA_BYTES = 4096


def _infer(proto: onnx.ModelProto, arrays: Sequence[Array], version: int) -> dict[str, onnx.TypeProto]:
    node = proto.graph.node[0]
    types = {value.name: value.type for value in proto.graph.input}
    data = {
        name: onnx.numpy_helper.from_array(array)
        for name, array in zip(node.input, arrays, strict=False)
        if name and array.nbytes <= _DATA_BYTES and array.dtype.kind in "iufb"
    }
    try:
        schema = onnx.defs.get_schema(node.op_type, version, node.domain)
        found = onnx.shape_inference.infer_node_outputs(
            schema, node, types, data, opset_imports=list(proto.opset_import), ir_version=10
        )
    except (
        onnx.shape_inference.InferenceError,
        onnx.defs.SchemaError,
        onnx.checker.ValidationError,
        RuntimeError,
    ) as error:
        raise Refused(f"its shapes cannot be inferred ({first_line(error)})") from error
    return dict(found)


def _agree(first: Sequence[Array], second: Sequence[Array]) -> None:
    for a, b in zip(first, second, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            raise Refused(f"two engines disagree: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
        if not is_floating(a):
            if not np.array_equal(a, b):
                raise Refused("two engines disagree")
            continue
        try:
            gap, largest, _ = difference(a, b, "")
        except OnnxEvidenceError as error:
            raise Refused("two engines disagree on NaN or infinity") from error
        if gap > _AGREE_ULP * ulp_of(largest, a.dtype):
            raise Refused(f"two engines disagree by {gap:.3g}")
