"""The tensorflow backend: inference graphs as functions of TensorFlow that XLA compiles (`jit_compile=True`).

Each rewritten graph is lowered as `memopt.export_tensorflow` lowers it, and called by TensorFlow in this
process; its first results are compared with PyTorch's, beside float64, before they are used. Inputs and results are
copied, as a TensorFlow program would have them; weights are TensorFlow's own copy, made anew when PyTorch's change.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import Boxed, emit, lower_inference
from memopt.capture.dynamo import Hooks, Watched
from memopt.engine import Engine
from memopt.program import InputKind, Program

# Weights above this size are not widened to float64 for the comparison on the first call.
_WIDE_BYTES = 1 << 29
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER)


class TensorFlowBackend(Engine):
    """Runs inference graphs with TensorFlow on the CPU.

    Args:
        device: where the model is.

    Raises:
        ValueError: a package is missing, or the model is not on the CPU; one line says what to do.
    """

    name = "tensorflow"
    exact = False

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
            program, rewrite = hooks.inference(module)
            if hooks.dry:
                return emit(module)
            arguments = [entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
            weights = {entry.name for entry in program.inputs if entry.kind in _WEIGHTS and entry.name in program.state}
            fixed = frozenset(index for index, entry in enumerate(arguments) if entry.name in weights)

            def watched(program: Program) -> Program:
                return dataclasses.replace(program, baked=program.baked | weights)

            def again(state: Mapping[str, torch.Tensor]) -> Program:
                return watched(rewrite(state))

            def build(module: fx.GraphModule) -> _Runner:
                return _Runner(module, fixed)

            return Watched(watched(program), again, build)

        return lower_inference(graph_module, example_inputs, inference)


class _Runner:
    """One graph: lowered and compared at its first call, run by TensorFlow ever after."""

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, fixed: frozenset[int]) -> None:
        self._module, self._fixed = module, fixed
        results: Any = module.graph.output_node().args[0]
        self._results = [node.meta["val"] if isinstance(node, fx.Node) else node for node in results]
        self._function: Callable[[Sequence[Any]], list[torch.Tensor]] | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on a list of inputs, which is emptied."""
        values = list(args)
        args.clear()
        if self._function is None:
            # AOTAutograd calls with its own dispatch keys switched off: a new thread has all.
            with ThreadPoolExecutor(1) as thread:
                self._function = thread.submit(self._load, values).result()
        found = iter(self._function(values))
        return [_laid_out(next(found), like) if isinstance(like, torch.Tensor) else like for like in self._results]

    def _load(self, values: Sequence[Any]) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
        from memopt.convert.reference import run_wide
        from memopt.convert.verify import compare_all
        from memopt.tensorflow.function import function_of

        with torch.no_grad():
            function = function_of(self._module, {index: values[index].detach() for index in sorted(self._fixed)})
            plain = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
            names = [f"output_{number}" for number, like in enumerate(self._results) if isinstance(like, torch.Tensor)]

            def tensors(**given: Any) -> list[torch.Tensor]:
                return [value for value in self._module(*given.values()) if isinstance(value, torch.Tensor)]

            named = {f"input_{number}": value for number, value in enumerate(plain)}
            small = sum(value.nbytes for value in plain if isinstance(value, torch.Tensor)) <= _WIDE_BYTES
            wide = run_wide(tensors, named) if small else None
            compare_all(names, function(plain), tensors(**named), wide)
        return function


def _laid_out(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The value with the strides that PyTorch's own result has."""
    if value.stride() == like.stride():
        return value
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(value)
