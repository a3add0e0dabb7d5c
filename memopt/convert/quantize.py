"""Weights of matrix products in int8, activations quantized as they come, by onnxruntime.quantization."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir

from memopt.convert.errors import ConversionError
from memopt.convert.record import count_nodes
from memopt.convert.write import SINGLE_FILE_BYTES
from memopt.errors import first_line
from memopt.onnx.read import weight_bytes

# Convolutions stay as they are: on the CPU their integer kernels are slower than float32's.
_OPERATORS = ["MatMul", "Gemm", "Gather"]
_INTEGER = ("MatMulInteger", "DequantizeLinear")


def quantized(model: ir.Model) -> tuple[ir.Model, str]:
    """Return the model with int8 weights, one scale for each column, and one line that says what was done.

    Weights use seven of the eight bits: the products of eight overflow 16 bits on processors without VNNI, and the file
    has to compute the same everywhere.

    Args:
        model: the model; it is not changed.

    Raises:
        ConversionError: nothing in it can be quantized, or its weights do not fit into one file.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-untyped]

    if weight_bytes(model) > SINGLE_FILE_BYTES:
        raise ConversionError(f"weights above {SINGLE_FILE_BYTES} bytes cannot be quantized")
    with tempfile.TemporaryDirectory(prefix="memopt-") as folder, _quiet():
        target, given = Path(folder) / "q.onnx", ir.to_proto(model)
        given.graph.ClearField("value_info")  # weights are turned, and their shapes with them
        try:
            quantize_dynamic(
                given,
                target,
                op_types_to_quantize=_OPERATORS,
                per_channel=True,
                reduce_range=True,
                weight_type=QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True, "EnableSubgraph": False},
            )
        except Exception as error:  # it raises whatever comes up
            raise ConversionError(f"onnxruntime.quantization stops: {first_line(error)}") from error
        found: ir.Model = ir.from_proto(onnx.load(target))
    counted = count_nodes(found)
    made = {kind: counted[kind] for kind in _INTEGER if kind in counted}
    if not made:
        raise ConversionError("nothing in the model can be quantized: it has no products with constant matrices")
    found.producer_name = model.producer_name
    return found, "int8: " + ", ".join(f"{count} {kind}" for kind, count in made.items())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep it from logging advice that is followed already."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
