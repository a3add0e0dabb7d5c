"""Gradients that hooks of their parameters use and drop: when each may be handed over, in the middle of backward.

A gradient goes to its parameter's hooks once nothing reads it any more, nor the parameter itself: a hook that steps an
optimizer writes to the parameter. Parameters of one module go together, as one optimizer may step them all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn

from memopt.memory.aliasing import Aliasing
from memopt.memory.distributed import buckets_of
from memopt.program import InputKind, OutputKind, Phase, Program
from memopt.torch_compat.modules import hooks_after_accumulation, is_stepped_in_backward

_HANDED = "handed over within backward"


@dataclasses.dataclass(frozen=True)
class HandOver:
    """Gradients that are handed over together.

    Attributes:
        after: the name of the call node behind which they are.
        outputs: which of the program's outputs they are; of a graph's, once it was cut.
    """

    after: str
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Handing:
    """How the backward graph of a program hands gradients over.

    Attributes:
        hand_overs: in order, by the graph's outputs.
        inputs: per output of the graph, which input of the captured graph it is the gradient of; -1 for none.
        shown: by name, nodes that show a parameter's or a buffer's memory, and its name: hooks may write there.
    """

    hand_overs: tuple[HandOver, ...]
    inputs: tuple[int, ...]
    shown: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Due:
    """Gradients of one module's parameters, for code that finds out by itself when they are final.

    Attributes:
        outputs: which of the backward graph's results they are.
        shown: names of the values that show these parameters, which are not to be read any more.
    """

    outputs: tuple[int, ...]
    shown: frozenset[str]


def is_hooked(parameter: torch.Tensor) -> bool:
    """Whether a parameter has hooks that run as soon as its gradient is accumulated."""
    return bool(hooks_after_accumulation(parameter)) or is_stepped_in_backward(parameter)


def hooked_names(model: nn.Module) -> frozenset[str]:
    """The first names of the parameters that have such hooks, without those whose gradients lie in buckets of DDP's."""
    hooked = [(name, p) for name, p in model.named_parameters() if p.requires_grad and is_hooked(p)]
    buckets = buckets_of(model).viewed if hooked else frozenset()
    return frozenset(name for name, p in hooked if id(p) not in buckets)


def marked(program: Program, names: Iterable[str]) -> Program:
    """A training program whose gradients of these parameters are handed over."""
    known = frozenset(names)
    of = {entry.name: entry.target for entry in program.inputs}
    outputs = [
        dataclasses.replace(output, handed=output.kind is OutputKind.GRADIENT and of.get(str(output.target)) in known)
        for output in program.outputs
    ]
    return dataclasses.replace(program, outputs=tuple(outputs))


def mark_handed(backward: fx.GraphModule, program: Program) -> None:
    """Have a backward graph know which of its results it hands over before it ends; see `handed_of`."""
    results = program.outputs[program.forward_outputs :]
    backward.meta[_HANDED] = frozenset(place for place, output in enumerate(results) if output.handed)


def handed_of(module: fx.GraphModule) -> frozenset[fx.Node]:
    """The results of a graph that are gone as soon as nothing reads them any more, where it was marked."""
    places: frozenset[int] = module.meta.get(_HANDED, frozenset())
    results: Any = module.graph.output_node().args[0] if places else ()
    kept = {value for place, value in enumerate(results) if place not in places}
    return frozenset(value for value in results if isinstance(value, fx.Node) and value not in kept)


def hand_overs(program: Program, aliasing: Aliasing) -> list[HandOver]:
    """When each of the marked gradients is handed over, in order; those that others show stay to the end."""
    calls = program.calls
    if not any(output.handed for output in program.outputs):
        return []
    position = {node: index for index, node in enumerate(calls)}
    last: dict[int, int] = {}  # by storage, the last call of backward that makes or reads it
    for index, node in enumerate(calls):
        if node.meta["phase"] is Phase.BACKWARD:
            for value in (node, *node.all_input_nodes):
                last.update(dict.fromkeys(aliasing.of.get(value, ()), index))
    of = {node.name: aliasing.of.get(node, ()) for node in program.placeholders}
    targets = {entry.name: entry.target or "" for entry in program.inputs}
    groups: dict[str, list[tuple[int, int]]] = {}
    for number in _apart(program, aliasing):
        value, placeholder = program.output_nodes[number], str(program.outputs[number].target)
        read = (*aliasing.of[value], *of.get(placeholder, ()))
        when = max(position[value], *(last.get(index, -1) for index in read))
        groups.setdefault(targets[placeholder].rpartition(".")[0], []).append((when, number))
    found = [(max(when for when, _ in items), tuple(number for _, number in items)) for items in groups.values()]
    return [HandOver(calls[when].name, outputs) for when, outputs in sorted(found)]


def due(program: Program, aliasing: Aliasing, names: Iterable[str]) -> list[Due]:
    """The gradients of these parameters, by the module that has them."""
    known, targets = frozenset(names), {entry.name: entry.target or "" for entry in program.inputs}
    of = {node.name: set(aliasing.of.get(node, ())) for node in program.placeholders}
    groups: dict[str, list[int]] = {}
    memory: dict[str, set[int]] = {}
    for number, output in enumerate(program.outputs[program.forward_outputs :]):
        name = targets.get(output.target or "", "")
        if output.kind is OutputKind.GRADIENT and name in known:
            module = name.rpartition(".")[0]
            groups.setdefault(module, []).append(number)
            memory.setdefault(module, set()).update(of.get(output.target or "", ()))
    return [
        Due(
            tuple(numbers),
            frozenset(node.name for node, indices in aliasing.of.items() if memory[module].intersection(indices)),
        )
        for module, numbers in groups.items()
    ]


def handing(program: Program, aliasing: Aliasing, position: Mapping[str, int]) -> Handing | None:
    """How the backward graph of a program hands gradients over; None where it returns all in the end.

    Args:
        program: a training program, planned.
        aliasing: its storages.
        position: by name of a placeholder, which input of the captured graph it is.
    """
    found, start = hand_overs(program, aliasing), program.forward_outputs
    if not found or not gives_gradients_only(program, position):
        return None
    return Handing(
        tuple(HandOver(item.after, tuple(number - start for number in item.outputs)) for item in found),
        sources(program, position),
        showing(program, aliasing),
    )


def gives_gradients_only(program: Program, position: Mapping[str, int]) -> bool:
    """Whether backward returns nothing but gradients of the graph's inputs, and forward writes to buffers only."""
    late = list(zip(program.outputs, program.output_nodes, strict=True))[program.forward_outputs :]
    plain = all(value is None or (out.kind is OutputKind.GRADIENT and out.target in position) for out, value in late)
    kinds = {entry.name: entry.kind for entry in program.inputs}
    return plain and all(kinds[name] is InputKind.BUFFER for name in program.mutated)


def sources(program: Program, position: Mapping[str, int]) -> tuple[int, ...]:
    """Per result of backward, which input of the captured graph it is the gradient of; -1 for none."""
    return tuple(position.get(out.target or "", -1) for out in program.outputs[program.forward_outputs :])


def showing(program: Program, aliasing: Aliasing) -> dict[str, str]:
    """By name, the values that show a parameter's or a buffer's memory, and its name."""
    named = {
        index: entry.target or entry.name
        for node, entry in zip(program.placeholders, program.inputs, strict=True)
        if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        for index in aliasing.of.get(node, ())
    }
    return {node.name: named[index] for node, indices in aliasing.of.items() for index in indices if index in named}


def changed_by_hook(name: str) -> None:
    """Refuse a parameter that was changed while backward still reads it.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(
        f"{name} was changed by a hook of another module's parameter while backward still reads it: "
        "let such hooks change parameters of their own module only"
    )


def _apart(program: Program, aliasing: Aliasing) -> list[int]:
    """The marked gradients whose memory backward makes, and no other output shows."""
    shown: dict[int, int] = {}
    for value in program.output_nodes:
        for index in set(aliasing.of.get(value, ())) if isinstance(value, fx.Node) else ():
            shown[index] = shown.get(index, 0) + 1

    def is_apart(value: object) -> bool:
        if not isinstance(value, fx.Node) or value.op != "call_function" or value.meta["phase"] is not Phase.BACKWARD:
            return False
        producers = [aliasing.storages[index].producer for index in aliasing.of[value]]
        made = all(node.op == "call_function" and node.meta["phase"] is Phase.BACKWARD for node in producers)
        return made and all(shown[index] == 1 for index in aliasing.of[value])

    return [
        number
        for number, (output, value) in enumerate(zip(program.outputs, program.output_nodes, strict=True))
        if output.handed and is_apart(value)
    ]
