"""ONNX graphs: rewrites with evidence, on `onnx_ir` models. Needs the `onnx` extra."""

import importlib.util

for _name in ("onnx", "onnx_ir", "onnxruntime"):
    if importlib.util.find_spec(_name) is None:
        raise ImportError(f"memopt.onnx needs {_name}: pip install memopt[onnx]", name=_name)

from memopt.onnx.evidence import OnnxEvidence, OnnxEvidenceError  # noqa: E402
from memopt.onnx.graph_pass import OnnxPass, OnnxPassResult  # noqa: E402
from memopt.onnx.load import OnnxModelError, fix_initializers, prepare  # noqa: E402
from memopt.onnx.manager import OnnxPassError, OnnxPassManager, OnnxPassRecord  # noqa: E402
from memopt.onnx.passes import ONNXRUNTIME, ONNXRUNTIME_CUDA, STANDARD  # noqa: E402

__all__ = [
    "ONNXRUNTIME",
    "ONNXRUNTIME_CUDA",
    "STANDARD",
    "OnnxEvidence",
    "OnnxEvidenceError",
    "OnnxModelError",
    "OnnxPass",
    "OnnxPassError",
    "OnnxPassManager",
    "OnnxPassRecord",
    "OnnxPassResult",
    "fix_initializers",
    "prepare",
]
