"""A trial step: the finished program run once on made-up inputs, and what it really took."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.backends.aten import emit, emit_pieces
from memopt.backends.hand_over import drained
from memopt.capture.joint import constants_to_attributes
from memopt.capture.real_arguments import real_argument
from memopt.common.phases import phase
from memopt.graph.synthesis import is_cuda, same_random_state, synthesize
from memopt.graph.targets import is_collective
from memopt.memory.aliasing import analyse
from memopt.memory.allocator import slack_bytes
from memopt.memory.allocator_limit import lifted
from memopt.memory.cost.roofline import span
from memopt.memory.hand_over import Handing, hand_overs
from memopt.memory.measure import measure
from memopt.memory.rounding import allocated_bytes
from memopt.memory.timeline import held_tangents
from memopt.program import InputKind, Phase, Program
from memopt.step.planned import Planned
from memopt.torch_compat import pytree
from memopt.torch_compat.autograd_nodes import gradients_are_held


class TrialError(RuntimeError):
    """The trial could not be run; the message says why."""


class TrialMemoryError(TrialError):
    """Memory ran out in the trial."""


def trial(program: Program) -> int:
    """Run the program once with the aten backend and return its measured peak in bytes above its inputs.

    Weights are the real ones where they are known, and so are the caller's tensors where they were noted
    (`memopt.capture.real_arguments`); other user inputs are random, with zeros for integers, so that they stay valid as
    indices. In a training program the tangents appear where backward starts. Random number generators are left as
    they were. Nothing of the model changes: the program is functional.

    Raises:
        TrialError: an operator refuses the made-up inputs.
        TrialMemoryError: memory ran out; all that the trial held is free again.
    """
    runnable = _with_own_tangents(program) if program.training else program
    run = runs(runnable)
    fakes = [node.meta["val"] for node in runnable.placeholders]
    device = _device(fakes)
    failure: TrialError
    try:
        with torch.no_grad(), same_random_state(fakes):
            arguments = [
                program.state[node.name] if node.name in program.state else _value_for(node)
                for entry, node in zip(runnable.inputs, runnable.placeholders, strict=True)
                if entry.kind is not InputKind.CONSTANT
            ]
            with phase("trial steps"), lifted(device):
                start = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
                taken = measure(run, arguments, device=device)
            # What the allocator loses between blocks counts as far as it is more than the slack left to it.
            reserved = (taken.reserved_bytes or 0) - start
            return max(taken.peak_bytes, reserved - slack_bytes(reserved, device))
    except (RuntimeError, IndexError, ValueError, MemoryError) as error:
        kind = TrialMemoryError if is_out_of_memory(error) else TrialError
        failure = kind(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}")
    # Raised out here, so that no traceback holds on to the trial's tensors.
    if device.type == "cuda" and isinstance(failure, TrialMemoryError):
        torch.cuda.empty_cache()
    raise failure


def bytes_beside(program: Program) -> int:
    """Bytes that a trial holds beside what the program takes: inputs that are made up, and the random state."""
    made = [
        node.meta["val"]
        for entry, node in zip(program.inputs, program.placeholders, strict=True)
        if entry.kind not in (InputKind.CONSTANT, InputKind.TANGENT)
        and node.name not in program.state
        and isinstance(node.meta["val"], torch.Tensor)
        and real_argument(node) is None
    ]
    random = torch.get_rng_state().nbytes
    return random + sum(allocated_bytes(span(each) * each.element_size(), each.device) for each in made)


def runs(program: Program) -> Callable[[list[Any]], Sequence[Any]]:
    """The function of a whole program; gradients that are handed over are dropped where they would be."""
    found = hand_overs(program, analyse(program)) if any(output.handed for output in program.outputs) else []
    module = constants_to_attributes(program)
    return drained(emit_pieces(module, Handing(tuple(found), (), {}))) if found else emit(module)


def tried(planned: Planned) -> Planned:
    """The planned graph with what a run of it took, or why there was none."""
    if any(is_collective(node.target) for node in planned.program.calls):  # which the other ranks may not be trying
        return dataclasses.replace(planned, measured=None, failure="its collectives would wait for the other ranks")
    try:
        return dataclasses.replace(planned, measured=trial(planned.program), failure="", ran_out=False)
    except TrialError as error:
        ran_out = isinstance(error, TrialMemoryError)
        return dataclasses.replace(planned, measured=None, failure=str(error), ran_out=ran_out)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device's or the machine's memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _value_for(node: fx.Node) -> Any:
    value = real_argument(node)
    return synthesize(node.meta["val"]) if value is None else value


def _device(arguments: list[Any]) -> torch.device:
    return next((leaf.device for leaf in pytree.tree_leaves(arguments) if is_cuda(leaf)), torch.device("cpu"))


def _let_go(values: Sequence[Any]) -> None:
    """Where a caller lets go of what forward has returned."""


def _with_own_tangents(program: Program) -> Program:
    """Make the tangents where backward starts, and have what the caller lets go of there no longer."""
    edited = program.copy()
    graph = edited.graph
    first = next((node for node in edited.calls if node.meta["phase"] is Phase.BACKWARD), graph.output_node())
    values = list(zip(edited.output_nodes, edited.outputs, strict=True))
    released = [value for value, output in values if output.let_go]
    if released:
        with graph.inserting_before(first):
            graph.call_function(_let_go, (released,)).meta.update(val=None, phase=Phase.FORWARD)
        graph.output_node().args = ([None if output.let_go else value for value, output in values],)
    inputs, held = [], list[fx.Node]()
    stay = held_tangents(edited) if gradients_are_held() else ()
    for entry, node in zip(program.inputs, edited.placeholders, strict=True):
        value = node.meta["val"]
        if entry.kind is not InputKind.TANGENT or not isinstance(value, torch.Tensor):  # the mesh of a sharded result
            inputs.append(entry)
            continue
        with graph.inserting_before(first):
            made = graph.call_function(
                torch.ops.aten.empty_strided.default,
                (list(value.shape), list(value.stride())),
                {"dtype": value.dtype, "device": value.device},
            )
            filled = graph.call_function(torch.ops.aten.fill_.Scalar, (made, 1))
        for new in (made, filled):
            new.meta.update(val=value, phase=Phase.BACKWARD)
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
        if node in stay:
            held.append(filled)
    if held:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(_let_go, (held,)).meta.update(val=None, phase=Phase.BACKWARD)
    return dataclasses.replace(edited, inputs=tuple(inputs))
