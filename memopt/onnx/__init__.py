"""ONNX graphs: rewrites with evidence, on `onnx_ir` models. Needs the `onnx` extra."""

try:
    import onnx as _onnx
    import onnx_ir as _onnx_ir
except ImportError as error:
    raise ImportError(f"memopt.onnx needs {error.name}: pip install memopt[onnx]") from error

__all__: list[str] = []
