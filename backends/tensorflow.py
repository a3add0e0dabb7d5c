"""The tensorflow backend: inference graphs as functions of TensorFlow that XLA compiles (`jit_compile=True`).

Each rewritten graph is lowered as `memopt.export_tensorflow` lowers it, and called by TensorFlow in this
process; its first results are compared with PyTorch's, beside float64, before they are used. Inputs and results are
copied, as a TensorFlow program would have them; weights are TensorFlow's own copy, made anew when PyTorch's change.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import Boxed, emit_collected, lower_inference
from memopt.backends.foreign import ForeignFunction, ForeignWeights, Run, weights_of
from memopt.capture.dynamo import Hooks
from memopt.capture.watched import Watched
from memopt.engine import Engine

# Weights above this size are not widened to float64 for the comparison on the first call.
_WIDE_BYTES = 1 << 29


class TensorFlowBackend(Engine):
    """Runs inference graphs with TensorFlow on the CPU.

    Args:
        device: where the model is.

    Raises:
        ValueError: a package is missing, or the model is not on the CPU; one line says what to do.
    """

    name = "tensorflow"
    exact = False
    recurrent = False

    def __init__(self, device: torch.device) -> None:
        for package in ("tensorflow", "jax", "torchax", "onnx"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"backend 'tensorflow' needs {package}: pip install memopt[tensorflow]")
        if device.type != "cpu":
            raise ValueError(f"backend 'tensorflow' runs on cpu, not on {device.type}: use backend 'xla' there")

    def compile_captured(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Any:
        """Lower one Dynamo graph.

        Raises:
            RuntimeError: gradients or random numbers are asked for.
            LowerError: an operator has no form under XLA.
        """
        if hooks.needs_gradients and not hooks.dry:
            raise RuntimeError("backend 'tensorflow' computes no gradients: call the model under torch.no_grad()")

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed | Watched:
            if hooks.dry:
                return emit_collected(module, hooks)
            program, rewrite = hooks.inference(module)
            return ForeignWeights(program, rewrite, weights_of(program), _Function)

        return lower_inference(graph_module, example_inputs, inference)


class _Function(ForeignFunction):
    """One graph: lowered and compared at its first call, run by TensorFlow ever after."""

    def load(self, values: Sequence[Any]) -> Run:
        """Lower the graph, with the weights that it is given."""
        from memopt.convert.reference import run_wide
        from memopt.convert.verify import compare_all
        from memopt.tensorflow.function import function_of

        with torch.no_grad():
            function = function_of(self.module, {index: values[index].detach() for index in sorted(self.fixed)})
            plain = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
            names = [f"output_{number}" for number, like in enumerate(self.results) if isinstance(like, torch.Tensor)]

            def tensors(**given: Any) -> list[torch.Tensor]:
                return [value for value in self.module(*given.values()) if isinstance(value, torch.Tensor)]

            named = {f"input_{number}": value for number, value in enumerate(plain)}
            small = sum(value.nbytes for value in plain if isinstance(value, torch.Tensor)) <= _WIDE_BYTES
            wide = run_wide(tensors, named) if small else None
            compare_all(names, function(plain), tensors(**named), wide)
        return function
