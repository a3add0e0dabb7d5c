"""The onnxruntime backend: inference graphs as ONNX Runtime sessions that read and write PyTorch's own memory.

Each rewritten program is exported through memopt's ONNX pipeline, handed to a session as bytes, and compared with
PyTorch on the first call's inputs, beside float64, before its results are used. Inputs and results are bound by
address: nothing is copied between host and device. Weights are ONNX Runtime's own copy, which it lays out for its
kernels; under a budget they stay PyTorch's, bound like inputs, so that they exist once, and what a run takes above them
is measured on the first call and held against the budget: where it is more, less is planned for. Each shape has a
session of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from memopt.backends.aten import Boxed, emit, emit_collected, lower_inference
from memopt.backends.choose import within_budget
from memopt.backends.foreign import ForeignFunction, ForeignWeights, Run, weights_of
from memopt.capture.dynamo import Hooks, compilation_of
from memopt.capture.watched import Rewrite, Watched
from memopt.engine import Engine
from memopt.memory.allocator_limit import lifted
from memopt.onnxruntime.attention import plain_attention
from memopt.onnxruntime.memory import peak_of
from memopt.onnxruntime.session import Session, Settings, check_provider
from memopt.program import Program, draws_numbers
from memopt.step.inference import settling
from memopt.torch_compat.boxed import boxed

if TYPE_CHECKING:
    from memopt.compilation.session import Session as Compilation

# Weights above this size are not widened to float64 for the comparison on the first call.
_WIDE_BYTES = 1 << 29


class OnnxRuntimeBackend(Engine):
    """Runs inference graphs with ONNX Runtime on the CPU or on CUDA.

    Args:
        device: where the model is.
        share_weights: bind the weights by address instead of giving ONNX Runtime a copy, and let it keep no memory of
            its own: half the memory, slower.
        limit: bytes that a session may allocate on a CUDA device; None for no limit.

    Raises:
        ValueError: a package is missing, or ONNX Runtime has no provider for the device; one line says what to install.
    """

    name = "onnxruntime"
    exact = False
    recurrent = False
    measures = True  # a run says what it takes: the program's own timeline is that of other kernels

    def __init__(self, device: torch.device, *, share_weights: bool = False, limit: int | None = None) -> None:
        for package in ("onnxruntime", "onnx", "onnxscript"):
            if importlib.util.find_spec(package) is None:
                raise ValueError(f"backend 'onnxruntime' needs {package}: pip install memopt[onnx]")
        check_provider(device)
        self._settings = Settings(device, share_weights, limit)

    def compile_captured(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Any:
        """Lower one Dynamo graph. Raises RuntimeError where gradients or random numbers are asked for."""
        if hooks.needs_gradients and not hooks.dry:
            raise RuntimeError("backend 'onnxruntime' computes no gradients: call the model under torch.no_grad()")

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed | Watched:
            if hooks.dry:
                return emit_collected(module, hooks)
            program, rewrite = hooks.inference(module)
            _check(program)
            if _empty(program):  # ONNX Runtime binds no tensor without elements, and there is nothing to save
                return Watched(program, rewrite, emit)
            if not self._settings.tight:
                return self._function(program, rewrite, weights_of(program), None)
            session = compilation_of(hooks)

            def settled(program: Program) -> ForeignWeights:
                return self._function(program, rewrite, (), settling(session))

            return _PlannedForLess(session, settled(program), lambda: settled(rewrite({})))

        return lower_inference(graph_module, example_inputs, inference)

    def _function(
        self, program: Program, rewrite: Rewrite, weights: Sequence[str], settle: Callable[[int | None], None] | None
    ) -> ForeignWeights:
        def build(module: fx.GraphModule, fixed: frozenset[int]) -> Boxed:
            return _Function(plain_attention(module), fixed, self._settings, settle)

        return ForeignWeights(program, rewrite, weights, build)


def _check(program: Program) -> None:
    for node in program.calls:
        if draws_numbers(node):
            raise RuntimeError(f"{node.name} draws random numbers: ONNX Runtime would draw others than PyTorch")
    for node, entry in zip(program.placeholders, program.inputs, strict=True):
        if not isinstance(node.meta["val"], torch.Tensor):
            raise RuntimeError(f"input {entry.name} is no tensor: an ONNX graph takes tensors only")


def _empty(program: Program) -> bool:
    """Whether an input or a result has no elements."""
    nodes = (*program.placeholders, *(node for node in program.output_nodes if node is not None))
    return any(isinstance(node.meta["val"], torch.Tensor) and node.meta["val"].numel() == 0 for node in nodes)


@boxed
class _PlannedForLess:
    """An inference function that is made anew, of a plan for less, as long as its first run is over the budget."""

    def __init__(self, session: Compilation, first: Boxed, again: Callable[[], Boxed]) -> None:
        self._session, self._again = session, again
        self._first: Boxed | None = first
        self._run: Boxed | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Run on a list of inputs, which is emptied. Raises BudgetError where no plan's run keeps the budget."""
        if self._run is not None:
            return self._run(args)
        given = list(args)
        args.clear()
        self._run, results = within_budget(self._session, lambda patient: self._made(given))
        return results

    def _made(self, given: Sequence[Any]) -> tuple[Boxed, Sequence[Any]]:
        run, self._first = self._first, None  # not two of them at a time
        if run is None:
            run = self._again()
        return run, run(list(given))


class _Bound(torch.nn.Module):
    """A graph with some of its inputs fixed."""

    def __init__(self, module: fx.GraphModule, fixed: Mapping[int, torch.Tensor], count: int) -> None:
        super().__init__()
        self.module, self.count = module, count
        self.names = {index: f"weight_{index}" for index in fixed}
        for index, value in fixed.items():
            self.register_buffer(self.names[index], value)

    def forward(self, *values: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(values)
        given = [getattr(self, self.names[index]) if index in self.names else next(rest) for index in range(self.count)]
        return [value for value in self.module(*given) if isinstance(value, torch.Tensor)]


class _Function(ForeignFunction):
    """One graph: exported, loaded, compared and measured at its first call, run by address ever after."""

    def __init__(
        self,
        module: fx.GraphModule,
        fixed: frozenset[int],
        settings: Settings,
        settle: Callable[[int | None], None] | None,
    ) -> None:
        super().__init__(module, fixed)
        self._settings, self._settle = settings, settle

    def load(self, values: Sequence[torch.Tensor]) -> Run:
        """Raises BudgetError where the first run takes more than the budget."""
        from memopt.convert.capture import Captured
        from memopt.convert.emit import emit as export
        from memopt.convert.reference import run_wide
        from memopt.convert.verify import compare_all
        from memopt.onnx import ONNXRUNTIME, ONNXRUNTIME_CUDA, OnnxPassManager

        # Of a model without weights only its inputs tell the device.
        device = next((value.device for value in values if value.device.type != "cpu"), self._settings.device)
        check_provider(device)
        settings = dataclasses.replace(self._settings, device=device)
        fixed = {index: values[index].detach() for index in sorted(self.fixed)}
        users = [value.detach() for index, value in enumerate(values) if index not in self.fixed]
        bound = _Bound(self.module, fixed, len(values))
        tensors = [value for value in self.results if isinstance(value, torch.Tensor)]
        names = [f"output_{index}" for index in range(len(tensors))]
        with torch.no_grad(), lifted(device):
            exported = torch.export.export(bound, tuple(users), strict=False)
            model = export(Captured(exported, bound, {}, {}, ()), names)
            passes = ONNXRUNTIME_CUDA if device.type == "cuda" else ONNXRUNTIME
            model, _ = OnnxPassManager(passes, verify=False).run(model)
            session = Session(model, tensors, settings)
            expected = bound(*users)
            small = sum(value.numel() * value.element_size() for value in values) <= _WIDE_BYTES
            named = dict(zip(session.inputs, users, strict=True))
            wide = run_wide(lambda **given: bound(*given.values()), named) if small else None
            compare_all(names, session.run(users), expected, wide)
            if self._settle is not None:
                del expected, wide
                run_bytes = peak_of(lambda: session.run(users), device)
                self._settle(None if run_bytes is None else run_bytes + session.held_bytes)
        held = self.fixed  # not self, which would keep the session in a cycle
        return lambda values: session.run([value for index, value in enumerate(values) if index not in held])
