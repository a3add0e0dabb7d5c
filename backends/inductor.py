"""The inductor backend: the rewritten graphs, compiled by torch's Inductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import AtenBackend, Boxed, emit_collected, lower_inference
from memopt.backends.choose import Bind, Chooser, within_budget
from memopt.backends.chunked import is_chunked
from memopt.backends.static import StaticBackend, device_of, minimum_timeline
from memopt.backends.watched import WatchedProgram
from memopt.capture.dynamo import Hooks, compilation_of
from memopt.engine import Engine, ManySizes, Recalled
from memopt.inductor.fusion import InductorFusion
from memopt.inductor.inference import InductorInference, uses_libraries, watching
from memopt.inductor.partition import NoBackward
from memopt.inductor.rehearsal import emit_training, rehearse
from memopt.inductor.symbolic import SymbolicTraining
from memopt.inductor.symbolic_inference import SymbolicInference
from memopt.inductor.training import Training
from memopt.memory.cost.table import CostTable
from memopt.memory.timeline import Timeline
from memopt.program import Program
from memopt.step.inference import settling
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.inductor_files import has_cpp_compiler, has_triton


class InductorBackend(Engine):
    """Inductor code for the rewritten graphs.

    Inductor fuses and orders for itself, so a plan is judged by the code that came of it: the wrapper of both graphs
    is run on fake tensors before any kernel is compiled. With enough memory torch's own partition is taken; else a
    plan is searched, and searched again with the difference between its operations and its code allowed for. Where no
    such code keeps the budget, the graph runs operator by operator, as the aten backend runs it.
    """

    name = "inductor"
    exact = False
    measures = True
    lays_out = True
    strided = True
    fuses = True
    many_sizes = True
    rehearses = True
    frees_outputs = True

    def __init__(self, *, beside: StaticBackend | None = None) -> None:
        """Make an engine.

        Args:
            beside: for inference, the engine to choose beside this one, by measured time under the budget.
        """
        self._beside = beside

    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Lower one Dynamo graph: Inductor's own training pipeline with memopt's partition, or its inference one."""
        session = compilation_of(hooks)
        if hooks.needs_gradients and session.exact:
            return AtenBackend().compile_captured(graph_module, example_inputs, hooks)
        if hooks.needs_gradients:
            with contextlib.suppress(NoBackward):
                return self._step(graph_module, example_inputs, hooks)
            hooks.infers()

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            if hooks.dry:
                return emit_collected(module, hooks)
            return within_budget(session, lambda patient: self._inference(module, hooks, patient=patient))

        return lower_inference(graph_module, example_inputs, inference)

    def _step(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Callable[..., Any]:
        session = compilation_of(hooks)
        if hooks.dry:
            lower = rehearse if session.collection.rehearsing else emit_training
            return lower(graph_module, example_inputs, hooks)
        hooks.handed.may(session.early)
        return _training(graph_module, example_inputs, hooks).compile()

    def compile_symbolic(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> ManySizes:
        """Inductor's code with dynamic shapes.

        Raises:
            SizesError: no code is made for many sizes, as nothing in the graph needs gradients, say.
        """
        if not hooks.needs_gradients:
            return SymbolicInference(graph_module, example_inputs, hooks).compile()
        with contextlib.suppress(NoBackward):
            return SymbolicTraining(graph_module, example_inputs, hooks).compile()
        raise SizesError("nothing that the graph computes needs gradients")

    def recall(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks, facts: bytes
    ) -> Recalled:
        """A training step's code, from the cache on disk."""
        return _training(graph_module, example_inputs, hooks).recall(facts)

    def _inference(self, module: fx.GraphModule, hooks: Hooks, *, patient: bool) -> Boxed:
        program, rewrite = hooks.inference(module)
        engines: dict[str, Bind] = {"inductor": InductorInference().bind}
        if self._beside is not None:
            engines[self._beside.name] = self._beside.bind
        instead = {"inductor": InductorInference(libraries=False).bind} if uses_libraries(program) else {}
        session = compilation_of(hooks)
        choose = Chooser(session, engines, settling(session), instead, patient=patient).bind
        return hooks.held(WatchedProgram(watching(program), lambda *known: watching(rewrite(*known)), choose))

    def timeline(self, program: Program, workspace: Mapping[str, int] | None = None) -> Timeline:
        """The memory of an inference program's operators; where there is a choice, in the arena that may run them.

        On CUDA, and of what runs in chunks, kernels write where they are told: the arena may be larger.
        """
        own = super().timeline
        if not program.training and (is_chunked(program) or device_of(program).type == "cuda"):
            own = minimum_timeline
        if self._beside is None or program.training:
            return own(program, workspace)
        lines = [self._beside.timeline(program, workspace)]
        if own is minimum_timeline:
            lines.append(own(program, workspace))
        return min(lines, key=lambda line: line.peak_bytes)

    def fusion(self, table: CostTable) -> InductorFusion:
        """What Inductor's kernels fuse away."""
        return InductorFusion(table)


def _training(graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Training:
    """A graph's lowering, from one attempt to the next."""
    if hooks.kept is None:
        hooks.keeps(Training(graph_module, example_inputs, hooks))
    training: Training = hooks.kept
    return training


def missing_compiler(device: torch.device) -> str | None:
    """Why Inductor cannot generate code for the device here, in one line; None when it can."""
    if device.type != "cpu":
        return None if has_triton() else "Inductor needs triton, which is not installed"
    if has_cpp_compiler():
        return None
    return "Inductor needs a C++ compiler, and none was found (install g++, or set CXX)"
