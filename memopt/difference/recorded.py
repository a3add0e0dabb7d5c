"""The programs of one call as captured, before any pass; where it is a real one, with the values of their inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableSet, Sequence
from typing import Any

import torch
from torch import fx, nn

from memopt.api import compile as compile_model
from memopt.backends.aten import AtenBackend
from memopt.calls.dynamo_settings import dynamo_settings
from memopt.calls.guard_fast_path import Kind
from memopt.calls.tracing import collect
from memopt.capture.dynamo import Hooks
from memopt.capture.graph_inputs import Names
from memopt.capture.shadow import model_names
from memopt.graph.synthesis import synthesize
from memopt.module import calls_of
from memopt.program import InputKind, Program
from memopt.step.call_role import CallRole
from memopt.step.guard import short_of_memory
from memopt.step.hooked import EarlyGradients
from memopt.step.plan_request import PlanRequest
from memopt.torch_compat.changing_numbers import ChangingNumbers
from memopt.torch_compat.dynamo import compiled_module


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A program as captured, and values of all its inputs but CONSTANT ones, in order.

    Values of parameters and buffers are those of the program's state, after the call; tangents are made up.
    """

    program: Program
    values: tuple[Any, ...]


def record_programs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> list[Recorded]:
    """Call the model once and return its graphs in order, as memopt's engines receive them before any pass.

    Args:
        model: called in its present mode; buffers that its forward updates are updated.
        args, kwargs: what it is called with.
        training: whether the graphs are joint ones, with backward.
    """
    recorder = _Recorder(model_names(model))
    with (
        dynamo_settings(ChangingNumbers(type(model).__name__)),
        torch.set_grad_enabled(training),
        torch.random.fork_rng(devices=[]),
    ):
        torch.manual_seed(0)
        compiled_module(model, recorder.backend, dynamic=False)(*args, **kwargs)
    return [Recorded(program, _values(program, given)) for program, given in recorder.found]


class _Recorder:
    """Stands where a session stands: takes every graph as it is."""

    dry = False
    early: EarlyGradients | None = None
    role = CallRole()

    def __init__(self, names: Names) -> None:
        self._names = names
        self.found: list[tuple[Program, list[Any]]] = []
        self.functions: MutableSet[Any] = set()

    def names(self) -> Names:
        return self._names

    def may_lack(self, program: Program, graph_break: bool) -> bool:
        return False

    def training(self, program: Program, graph_break: bool, request: PlanRequest | None) -> Program:
        self.found.append((program, []))
        return program

    def inference(self, program: Program) -> Program:
        self.found.append((program, []))
        return program

    def short_of_memory(self, error: torch.OutOfMemoryError) -> str:
        return short_of_memory(None, error)

    def backend(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        hooks: Any = Hooks(self, graph_module, example_inputs)
        number = len(self.found)
        compiled = AtenBackend().compile_captured(graph_module, example_inputs, hooks)

        def run(*args: Any) -> Any:
            if number < len(self.found) and not self.found[number][1]:
                self.found[number][1].extend(_kept(value) for value in args)
            return compiled(*args)

        return run


def _kept(value: Any) -> Any:
    """The value as it is before the call; a parameter, which no call changes, as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach() if isinstance(value, nn.Parameter) else value.detach().clone()


def _values(program: Program, given: Sequence[Any]) -> tuple[Any, ...]:
    left = list(given)
    torch.manual_seed(0)
    found = []
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind is InputKind.CONSTANT:
            continue
        if entry.kind is InputKind.TANGENT or not left:
            found.append(synthesize(node.meta["val"]))
            continue
        value = left.pop(0)
        found.append(program.state.get(entry.name, value))
    return tuple(found)


def capture_programs(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, training: bool
) -> list[Program]:
    """The graphs of one call in order, as memopt's passes receive them, without running the model.

    Raises:
        CaptureError: the model's control flow depends on the values of tensors.
    """
    session = calls_of(compile_model(model, backend="aten")).sessions.of(Kind(gradients=training, accumulating=False))
    with torch.set_grad_enabled(training):
        return collect(model, args, kwargs, session)
