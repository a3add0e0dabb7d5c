"""The inductor backend: the rewritten graphs, compiled by torch's Inductor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import compile_fx as inductor
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from memopt.backends.aten import Boxed, emit
from memopt.capture.dynamo import Hooks, Watched


class InductorBackend:
    """Inductor code for the rewritten graphs. Inductor orders and fuses for itself within each half of a step."""

    name = "inductor"

    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Lower one Dynamo graph: Inductor's own training pipeline with memopt's partition, or its inference one."""
        if hooks.needs_gradients:
            arguments: dict[str, Any] = {}
            if hooks.dry:
                arguments["inner_compile"] = _emit_only
            lowered: Any = inductor.compile_fx(
                graph_module, example_inputs, config_patches={"custom_partitioner_fn": _Partition(hooks)}, **arguments
            )
            return lowered  # type: ignore[no-any-return]

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            program, rewrite = hooks.inference(module)
            if hooks.dry:
                return emit(module)
            return Watched(program, rewrite, functools.partial(_compile_inference, inputs=inputs))

        def unused(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            return emit(module)

        lower = aot_autograd(fw_compiler=unused, bw_compiler=unused, inference_compiler=inference)
        return lower(graph_module, example_inputs)


def missing_compiler(device: torch.device) -> str | None:
    """Why Inductor cannot generate code for the device here, in one line; None when it can."""
    if device.type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Inductor needs triton, which is not installed"
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "Inductor needs a C++ compiler, and none was found (install g++, or set CXX)"
    return None


class _Partition(CustomPartitionerFn):
    """Inductor's hook for the joint graph, after its own joint-graph passes."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs.pop("compiler", None)
        return self._hooks.partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any | None:
        # The plan depends on the budget and the optimizer, which torch's cache key does not know: do not cache.
        return None


def _compile_inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
    """Compile a functional inference graph as a graph of its own, outside of the tracing that captured it."""
    with torch._guards.tracing(None), torch.no_grad():
        compiled: Any = inductor.compile_fx(module, list(inputs))

    def run(args: list[Any]) -> Sequence[Any]:
        values = tuple(args)
        args.clear()
        return compiled(*values)  # type: ignore[no-any-return]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _emit_only(module: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Boxed:
    return emit(module)
