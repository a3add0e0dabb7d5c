"""Small ONNX models from text, and one pass applied with proof."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from memopt.onnx.graph_pass import OnnxPass
from memopt.onnx.load import prepare
from memopt.onnx.manager import OnnxPassManager, OnnxPassRecord
from memopt.onnx.read import graphs


def model(text: str, weights: Mapping[str, Any] | None = None, opset: int = 18, **domains: int) -> onnx.ModelProto:
    """A model from the text of its graph, `(float[N,3] x) => (float[N,3] y) { y = Relu(x) }`.

    Of the weights those that the text names become its initializers.
    """
    imports = ", ".join([f'"" : {opset}', *(f'"{name}" : {version}' for name, version in domains.items())])
    found = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> graph {text}")
    for name, value in (weights or {}).items():
        if not re.search(rf"\b{name}\b", text):
            continue
        found.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return found


def apply(
    item: OnnxPass, given: onnx.ModelProto, inputs: list[dict[str, Any]] | None = None
) -> tuple[ir.Model, OnnxPassRecord]:
    """Run one pass on a model; what it changed is proved, and the given model must still be what it was."""
    bits = given.SerializeToString(deterministic=True)
    after, (record,) = OnnxPassManager([item], inputs=inputs).run(given)
    assert given.SerializeToString(deterministic=True) == bits
    if record.changes:
        assert record.evidence is not None, record.notes
        assert record.evidence.samples
    return after, record


def operators(found: ir.Model) -> list[str]:
    """The operators of all graphs, in order."""
    return [node.op_type for graph in graphs(found) for node in graph]


def reasons(record: OnnxPassRecord) -> str:
    """All refusals in one text."""
    return "\n".join(f"{refusal.node}: {refusal.reason}" for refusal in record.refusals)


def weight(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    """Random numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def unchanged(item: OnnxPass, given: onnx.ModelProto) -> OnnxPassRecord:
    """Assert that a pass returns the very model that it is given."""
    before = prepare(given)
    result = item.run(before)
    assert result.model is before, result.changes
    return apply(item, given)[1]
