"""The graph in float16 or bfloat16, with operators that lose too much there kept in float32."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from memopt.convert.clamp_mask_constants import within_float16
from memopt.convert.errors import ConversionError
from memopt.convert.precision import choose, is_float32
from memopt.onnx.edit import Edit, drop_initializer
from memopt.onnx.load import prepare
from memopt.pass_manager import Refusal


@dataclasses.dataclass(frozen=True, eq=False)
class Narrowed:
    """A model in lower precision.

    Attributes:
        model: with inputs and outputs as before.
        refusals: the nodes that stay in float32, and why.
        summary: how many nodes of which kinds, in one line.
    """

    model: ir.Model
    refusals: tuple[Refusal, ...]
    summary: str


def narrowed(model: onnx.ModelProto | ir.Model, kind: ir.DataType) -> Narrowed:
    """Return the model with weights and operators in the type, where `memopt.convert.precision` lets them.

    Inputs and outputs keep their types. Weights are rounded as they are written, one at a time. Nodes inside the graphs
    of other nodes (If, Loop, Scan) stay as they are.

    Args:
        model: the model; it is not changed.
        kind: FLOAT16 or BFLOAT16.

    Raises:
        ConversionError: no node can be computed in the type.
    """
    edit = Edit(prepare(model))
    graph = edit.model.graph
    if kind is ir.DataType.FLOAT16:
        within_float16(edit)
    chosen, reasons = choose(edit.model, kind)
    if not chosen:
        raise ConversionError(f"no operator of the model can be computed in {kind.name.lower()}: {_most(reasons)}")
    for node in list(graph):
        for value in node.outputs:
            if is_float32(value):
                _made(edit, node, value, chosen, kind)
    for value in [*graph.inputs, *graph.initializers.values()]:
        if is_float32(value):
            _given(edit, value, chosen, kind)
    refusals = tuple(Refusal(str(node.name), reason) for node, reason in reasons.items())
    name = kind.name.lower()
    kept = f"; {len(reasons)} stay in float32" if reasons else ""
    return Narrowed(edit.model, refusals, f"{len(chosen)} operators compute in {name}{kept}")


def _made(edit: Edit, node: ir.Node, value: ir.Value, chosen: set[ir.Node], kind: ir.DataType) -> None:
    """What a node makes: in the node's own type, and cast for those that want the other."""
    graph = edit.model.graph
    inside = node in chosen
    others = [use for use in value.uses() if (use.node in chosen) != inside]
    leaves = inside and value.is_graph_output()
    if others or leaves:
        cast = edit.node(
            node, "Cast", [value], {"to": int(ir.DataType.FLOAT if inside else kind)}, stem=f"{value.name}_cast"
        )
        graph.remove(cast)
        graph.insert_after(node, cast)
        turned = cast.outputs[0]
        turned.type, turned.shape = ir.TensorType(ir.DataType.FLOAT if inside else kind), value.shape
        for use in others:
            use.node.replace_input_with(use.idx, turned)
        if leaves:
            name = value.name
            for index, output in enumerate(graph.outputs):
                if output is value:
                    graph.outputs[index] = turned
            value.name = edit.fresh(f"{name}_{kind.name.lower()}")
            turned.name = name
    if inside:
        value.type = ir.TensorType(kind)


def _given(edit: Edit, value: ir.Value, chosen: set[ir.Node], kind: ir.DataType) -> None:
    """An input or a weight: weights are stored in the type, and in float32 too only where both are read."""
    graph = edit.model.graph
    uses = [use for use in value.uses() if use.node in chosen]
    if not uses:
        return
    if value.is_initializer() and not value.is_graph_input() and value.const_value is not None:
        stored = _rounded(value.const_value, kind, edit.fresh(f"{value.name}_{kind.name.lower()}"))
        turned = ir.Value(name=stored.name, type=ir.TensorType(kind), shape=value.shape, const_value=stored)
        graph.register_initializer(turned)
    else:
        first = next(iter(graph))
        turned = edit.node(first, "Cast", [value], {"to": int(kind)}, stem=f"{value.name}_cast").outputs[0]
        turned.type, turned.shape = ir.TensorType(kind), value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, turned)
    drop_initializer(value)


def _rounded(tensor: ir.TensorProtocol, kind: ir.DataType, name: str) -> ir.LazyTensor:
    def read() -> ir.Tensor[Any]:
        with np.errstate(under="ignore"):
            return ir.Tensor(tensor.numpy().astype(kind.numpy()), dtype=kind, name=name)

    return ir.LazyTensor(read, dtype=kind, shape=ir.Shape(tensor.shape.numpy()), name=name)


def _most(reasons: dict[ir.Node, str]) -> str:
    counted = Counter(reasons.values()).most_common(1)
    return counted[0][0] if counted else "it has none in float32"
