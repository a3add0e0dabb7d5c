"""What runs where Inductor cannot: training operator by operator, inference so or in one arena, whichever is faster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from memopt.backends.aten import AtenBackend, Boxed, emit, lower_inference
from memopt.backends.choose import Bind, Chooser, within_budget
from memopt.backends.static import StaticBackend
from memopt.backends.watched import WatchedProgram
from memopt.capture.dynamo import Hooks, compilation_of
from memopt.capture.joint import constants_to_attributes
from memopt.memory.timeline import Timeline
from memopt.program import Program
from memopt.step.inference import settling
from memopt.torch_compat.whole_operators import whole_operators


class AtenOrStaticBackend(AtenBackend):
    """The aten backend for training; for inference it or the static one, by measured time under the budget."""

    measures = True

    def __init__(self, static: StaticBackend) -> None:
        """Take the engine to choose beside the aten one."""
        self._static = static

    def compile_captured(
        self, graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks
    ) -> Callable[..., Any]:
        """Lower one Dynamo graph."""
        if hooks.needs_gradients or hooks.dry:
            return super().compile_captured(graph_module, example_inputs, hooks)

        def inference(module: fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
            session = compilation_of(hooks)

            def make(patient: bool) -> Boxed:
                program, rewrite = hooks.inference(module)
                engines: dict[str, Bind] = {"static": self._static.bind, "aten": _emit_program}
                choose = Chooser(session, engines, settling(session), patient=patient).bind
                return hooks.held(WatchedProgram(program, rewrite, choose))

            return within_budget(session, make)

        with whole_operators(example_inputs):
            return lower_inference(graph_module, example_inputs, inference)

    def timeline(self, program: Program, workspace: Mapping[str, int] | None = None) -> Timeline:
        """The memory of an inference program in the arena that may run it."""
        return self._static.timeline(program, workspace)


def _emit_program(program: Program) -> Boxed:
    return emit(constants_to_attributes(program))
