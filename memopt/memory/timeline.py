"""The bytes alive at every step of a program, as the aten backend executes it: each value freed after its last use."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import fx

from memopt.memory.aliasing import Aliasing, analyse, owner
from memopt.memory.hand_over import hand_overs
from memopt.program import InputKind, OutputKind, Phase, Program, tensors_of
from memopt.solve.liveness import profile
from memopt.torch_compat.autograd_nodes import gradients_are_held


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Bytes above the program's resident inputs (weights, buffers, user inputs), step by step.

    Attributes:
        steps: names of the call nodes in order of execution (items of multiple results left out).
        live_bytes: per step, the bytes alive while it runs: inputs still needed, results, and its workspace.
        workspace_bytes: per step, the part of it that is workspace.
        forward_steps: how many leading steps are the forward graph (all of them in an inference program).
        peak_bytes: the largest of `live_bytes`; 0 for a program without steps.
        live_at_peak: the storages alive at that step, as (name of the producing node, bytes), largest first.
        end_bytes: bytes that stay alive after the last step (outputs, gradients).
        saved_bytes: bytes of the storages that cross from forward to backward, outputs of forward included.
        gradient_bytes_at_peak: bytes of the gradients that are alive at that step.
    """

    steps: tuple[str, ...]
    live_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]
    forward_steps: int
    peak_bytes: int
    live_at_peak: tuple[tuple[str, int], ...]
    end_bytes: int
    saved_bytes: int
    gradient_bytes_at_peak: int = 0

    @property
    def peak_step(self) -> int:
        """Index of the first step at which the peak is reached; -1 without steps."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else -1


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """First and last step at which each storage is alive; None for storages that are resident all the time.

    `held` are those that outlive the last step: they reach the caller.
    """

    steps: tuple[fx.Node, ...]
    forward_steps: int
    spans: tuple[tuple[int, int] | None, ...]
    held: frozenset[int]

    def sized(self, aliasing: Aliasing) -> list[tuple[int, int, int]]:
        """The spans with the bytes of their storages, as `memopt.solve.liveness.profile` takes them."""
        pairs = zip(self.spans, aliasing.storages, strict=True)
        return [(*span, storage.nbytes) for span, storage in pairs if span is not None]


def held_of(tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of backward's tangents that autograd holds to its end: that of a loss, a root of it, on some torch all.

    Beside a loss the others are taken for zeros, which memopt makes where autograd has none (`step.missing_tangents`).
    """
    losses = [value for value in tangents if value.numel() == 1]
    return losses if losses or not gradients_are_held() else list(tangents)


def held_tangents(program: Program) -> set[fx.Node]:
    """The inputs that stand for tangents which autograd holds to the end of backward."""
    nodes = tangents_of(program)
    held = {id(value) for value in held_of([value for node in nodes for value in tensors_of(node)])}
    return {node for node in nodes if all(id(value) in held for value in tensors_of(node))}


def tangents_of(program: Program) -> list[fx.Node]:
    """The inputs of a program that backward begins with."""
    names = {entry.name for entry in program.inputs if entry.kind is InputKind.TANGENT}
    return [node for node in program.placeholders if node.name in names]


def lifetimes(program: Program, aliasing: Aliasing) -> Lifetimes:
    """Compute the half-open span [first, last + 1) of steps of every storage that is not resident."""
    steps = [node for node in program.calls if node.target is not operator.getitem]
    position = {node: index for index, node in enumerate(steps)}
    forward = len(steps)
    if program.training:
        forward = sum(node.meta["phase"] is Phase.FORWARD for node in steps)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    tangents, stay = set(tangents_of(program)), held_tangents(program)
    for node, indices in aliasing.of.items():
        if node.op == "placeholder":
            if node in tangents:  # they appear where backward starts, and die with their last use, unless held
                uses = [position[owner(user)] for user in node.users if user.op == "call_function"]
                if node in stay:
                    uses.append(len(steps) - 1)
                for index in indices:
                    first.setdefault(index, forward)
                    last[index] = max([forward, last.get(index, forward), *uses])
            continue
        if node.op != "call_function":
            continue
        uses = [position[owner(node)]]
        uses += [position[owner(user)] for user in node.users if user.op == "call_function"]
        for index in indices:
            producer = aliasing.storages[index].producer
            if producer.op == "call_function":
                first.setdefault(index, position[owner(producer)])
            if index in first:
                last[index] = max(last.get(index, -1), *uses)
    held: set[int] = set()
    named = {node.name: node for node in program.calls}
    given = {
        number: position[owner(named[item.after])] for item in hand_overs(program, aliasing) for number in item.outputs
    }
    for number, (output, value) in enumerate(zip(program.outputs, program.output_nodes, strict=True)):
        if not isinstance(value, fx.Node):
            continue
        # A mutation of forward is copied back and dropped when forward returns.
        dropped = output.kind is OutputKind.MUTATION or output.let_go
        dropped &= program.training and number < program.forward_outputs
        end = given.get(number, (forward if dropped else len(steps)) - 1)
        for index in aliasing.of[value]:
            if index in first:
                last[index] = max(last.get(index, -1), end)
                if not dropped and number not in given:
                    held.add(index)
    spans = tuple((first[i], last[i] + 1) if i in first else None for i in range(len(aliasing.storages)))
    return Lifetimes(tuple(steps), forward, spans, frozenset(held))


def timeline(
    program: Program, workspace: Mapping[str, int] | None = None, aliasing: Aliasing | None = None
) -> Timeline:
    """Simulate the program's memory.

    Args:
        program: any program; `meta["inplace"]` annotations are honoured.
        workspace: bytes that a node needs only while it runs, by node name.
        aliasing: the program's storages, where they are known already.
    """
    aliasing = aliasing or analyse(program)
    workspace = workspace or {}
    life = lifetimes(program, aliasing)
    spans = life.sized(aliasing)
    end = sum(aliasing.storages[index].nbytes for index in life.held)
    saved = sum(size for first, stop, size in spans if first < life.forward_steps < stop)
    scratch = [workspace.get(node.name, 0) for node in life.steps]
    live = (profile(len(scratch), spans) + np.array(scratch, dtype=np.int64)).tolist()
    peak = max(live, default=0)
    at = live.index(peak) if live else -1
    at_peak = sorted(
        (
            (storage.producer.name, storage.nbytes)
            for storage, span in zip(aliasing.storages, life.spans, strict=True)
            if span is not None and span[0] <= at < span[1]
        ),
        key=lambda item: -item[1],
    )
    gradients = {
        index
        for output, value in zip(program.outputs, program.output_nodes, strict=True)
        if output.kind is OutputKind.GRADIENT and isinstance(value, fx.Node)
        for index in aliasing.of[value]
    }
    gradients_at_peak = sum(
        storage.nbytes
        for storage, span in zip(aliasing.storages, life.spans, strict=True)
        if storage.index in gradients and span is not None and span[0] <= at < span[1]
    )
    return Timeline(
        tuple(node.name for node in life.steps),
        tuple(live),
        tuple(scratch),
        life.forward_steps,
        peak,
        tuple(at_peak),
        end,
        saved,
        gradients_at_peak,
    )


def kept_bytes(program: Program, known: Timeline) -> int:
    """Bytes by which backward's peak is higher where its graph is kept for another one: what is saved does not go.

    Args:
        program: a training program.
        known: its timeline.
    """
    aliasing = analyse(program)
    life = lifetimes(program, aliasing)
    forward, count = life.forward_steps, len(life.steps)
    ends = [(stop, count, size) for first, stop, size in life.sized(aliasing) if first < forward < stop]
    released = profile(count, ends)
    live = np.array(known.live_bytes, dtype=np.int64)
    return int((live + released)[forward:].max(initial=0) - live[forward:].max(initial=0))
