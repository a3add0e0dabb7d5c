"""An ONNX graph at another operator set, by the ONNX package's converter."""

from __future__ import annotations

import onnx
import onnx.version_converter
import onnx_ir as ir

from memopt.convert.errors import ConversionError
from memopt.convert.write import SINGLE_FILE_BYTES
from memopt.errors import first_line
from memopt.onnx.load import OnnxModelError, prepare
from memopt.onnx.read import weight_bytes


def at_opset(model: ir.Model, version: int) -> ir.Model:
    """Return the model with operators of the version, ready for passes.

    Raises:
        ConversionError: an operator has no form there that the converter knows, or the weights are too large for it.
    """
    if weight_bytes(model) > SINGLE_FILE_BYTES:
        raise ConversionError(f"weights above {SINGLE_FILE_BYTES} bytes cannot be put at another operator set")
    try:
        return prepare(onnx.version_converter.convert_version(ir.to_proto(model), version))
    except OnnxModelError as error:
        raise ConversionError(f"at operator set {version} {error}") from error
    except Exception as error:  # the converter raises whatever comes up
        raise ConversionError(f"the model cannot be put at operator set {version}: {first_line(error)}") from error
