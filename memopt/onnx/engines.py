"""Running a model: ONNX Runtime with its own optimizations off, and the ONNX package's reference evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

from memopt.errors import first_line

Feeds = Mapping[str, Any]

# Initializers from this size on are handed to ONNX Runtime beside the model: it may hold at most 2 GB itself.
_BESIDE = 1 << 20


class EngineError(RuntimeError):
    """The engine cannot run the model, or not on these inputs; the message is its first line."""


class Engine:
    """A loaded model: `run(feeds)` returns its outputs in order (arrays, or lists for sequences, or None).

    Raises:
        EngineError: at construction or in `run`.
    """

    name: str

    def run(self, feeds: Feeds) -> list[Any]:
        """Run on the inputs by name; `EngineError` where the engine cannot."""
        raise NotImplementedError


class OnnxRuntime(Engine):
    """ONNX Runtime on the CPU, one kernel per node: its rewrites are off."""

    name = "onnxruntime"

    def __init__(self, model: ir.Model) -> None:
        """Load the model; large weights are shared with it, not copied into the file format."""
        import onnxruntime  # type: ignore[import-untyped]

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        proto, self._weights = with_weights_beside(model)
        try:
            if self._weights:
                options.add_external_initializers(list(self._weights), list(self._weights.values()))
            self._session = onnxruntime.InferenceSession(
                proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its exceptions share no base class
            raise EngineError(short_line(error)) from error

    def run(self, feeds: Feeds) -> list[Any]:
        """Run on the inputs by name."""
        try:
            return list(self._session.run(None, dict(feeds)))
        except Exception as error:
            raise EngineError(short_line(error)) from error


class Reference(Engine):
    """The ONNX package's evaluator in numpy: slow, and independent of ONNX Runtime.

    Args:
        operators: implementations that take the place of its own.
    """

    name = "reference"

    def __init__(self, model: ir.Model, operators: Sequence[Any] = ()) -> None:
        from onnx.reference import ReferenceEvaluator

        try:
            self._evaluator = ReferenceEvaluator(ir.to_proto(model), new_ops=list(operators) or None)
        except Exception as error:
            raise EngineError(short_line(error)) from error

    def run(self, feeds: Feeds) -> list[Any]:
        """Run on the inputs by name."""
        try:
            with np.errstate(all="ignore"):
                return list(self._evaluator.run(None, dict(feeds)))
        except Exception as error:
            raise EngineError(short_line(error)) from error


def with_weights_beside(model: ir.Model) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The model as a proto whose large weights are only named, and those weights as ONNX Runtime values by name."""
    import onnxruntime

    bare = model.clone()
    large: dict[str, ir.TensorProtocol] = {}
    for value in list(bare.graph.initializers.values()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes >= _BESIDE and tensor.dtype.itemsize >= 1:
            large[str(value.name)] = tensor
            bare.graph.initializers.pop(str(value.name))
    proto = ir.to_proto(bare)
    values: dict[str, Any] = {}
    for name, tensor in large.items():
        entry = proto.graph.initializer.add(
            name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy(), data_location=onnx.TensorProto.EXTERNAL
        )
        entry.external_data.add(key="location", value=name)
        array = np.ascontiguousarray(tensor.numpy())
        if array.dtype.kind in "biuf":
            # Read from a file, a type may carry its order of bytes, which ONNX Runtime does not know.
            native = array.astype(array.dtype.newbyteorder("="), copy=False)
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(native)
        else:  # bfloat16 and the 8-bit floats, which numpy does not know, go by their bits
            bits = array.view({1: np.uint8, 2: np.uint16}[array.dtype.itemsize])
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(tensor.dtype))
    return proto, values


def short_line(error: BaseException) -> str:
    """The first line of an error's message, at most 300 characters of it: it may hold a whole graph."""
    return first_line(error)[:300]
