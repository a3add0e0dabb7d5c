"""OnnxRuntimePass: rewrites into operators that only ONNX Runtime has."""

from __future__ import annotations

import onnx_ir as ir

from memopt.onnx.engines import EngineError, OnnxRuntime
from memopt.onnx.graph_pass import OnnxPass, OnnxPassResult
from memopt.pass_manager import Refusal


class OnnxRuntimePass(OnnxPass):
    """A rewrite into operators of the domain com.microsoft; refused where ONNX Runtime cannot load the given model."""

    def run(self, model: ir.Model) -> OnnxPassResult:
        """Return the rewritten model, or the given one; see `OnnxPass.run`."""
        result = super().run(model)
        if result.model is model:
            return result
        try:
            OnnxRuntime(model)
        except EngineError as error:
            reason = f"ONNX Runtime cannot load the model, and no other engine has its operators: {error}"
            return OnnxPassResult(model, (), (*result.refusals, Refusal(str(model.graph.name), reason)))
        return result
