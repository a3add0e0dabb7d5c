"""Graphs that are only collected: emitted as they stand, and where their plan is rehearsed, judged by their code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from memopt.backends.aten import Boxed, emit
from memopt.capture.dynamo import Hooks, compilation_of
from memopt.common.phases import phase
from memopt.errors import first_line
from memopt.inductor.forward_backward import ForwardBackward
from memopt.inductor.partition import Partition, compile_training, keep_order, planned_cut
from memopt.inductor.replay import ReplayError
from memopt.inductor.workspace import MeasuredWorkspace
from memopt.torch_compat.inductor_errors import InductorError


def emit_training(graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Callable[..., Any]:
    """Lower a graph to its operators, captured as Inductor has it."""

    def operators(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Boxed:
        return hooks.apart(emit(module))

    lowered: Any = compile_training(graph_module, example_inputs, operators, Partition(hooks.partition))
    return lowered  # type: ignore[no-any-return]


def rehearse(graph_module: fx.GraphModule, example_inputs: Sequence[Any], hooks: Hooks) -> Callable[..., Any]:
    """Make the code of a planned graph and put on record what it takes; return the graph as its operators.

    No kernel is compiled: what is returned runs on fake tensors, to where the next graph is captured.
    """
    session = compilation_of(hooks)
    graphs = ForwardBackward(hooks.backward)
    partition = Partition(lambda joint, _, **options: planned_cut(hooks, joint, **options))

    def both(module: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Boxed:
        run = emit(module)  # before the compiler rewrites it
        graphs.compile(module, inputs, **options)
        return run

    try:
        with contextlib.ExitStack() as policy:
            keep_order(policy, partition)
            lowered: Any = compile_training(graph_module, example_inputs, both, partition)
        assert hooks.captured is not None
        with phase("replaying code"):
            session.emitted(hooks.captured, graphs.peaks(hooks.captured, MeasuredWorkspace(session.table)))
    except InductorError as error:  # the graph may hold what this version of Inductor has no code for
        session.note(f"Inductor has no code for this graph: {first_line(error)}")
        return emit_training(graph_module, example_inputs, hooks)
    except ReplayError as error:
        session.note(f"the peak of the generated code is not known: {error}")
    return lowered  # type: ignore[no-any-return]
