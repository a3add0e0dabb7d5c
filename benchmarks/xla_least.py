"""What a training step must hold when its operators run one by one, in autograd's order."""

from __future__ import annotations

import dataclasses
import operator
from typing import ClassVar

import torch
from torch import fx

from memopt.pass_manager import Pass, PassResult
from memopt.program import InputKind, OutputKind, Phase, Program, is_view


@dataclasses.dataclass(frozen=True)
class Least:
    """The largest such moment, in bytes: the step takes their sum or more.

    Attributes:
        resident_bytes: model and inputs.
        gradients_bytes: gradients of parameters that are made by then.
        operands_bytes: what the operator reads beside these.
        operator: which one.
    """

    resident_bytes: int
    gradients_bytes: int
    operands_bytes: int
    operator: str

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.resident_bytes + self.gradients_bytes + self.operands_bytes


class Seen(Pass):
    """Keeps the training program that it is shown, and changes nothing."""

    name: ClassVar[str] = "seen"

    def __init__(self) -> None:
        self.program: Program | None = None

    def run(self, program: Program) -> PassResult:
        """Return the program as it is."""
        self.program = program
        return PassResult(program, (), ())


def least(program: Program) -> Least:
    """Look at every operator of backward.

    An operand may be recomputed just before it is read, and a result may take an operand's place, so neither
    counts; operands must be there at once, beside model and inputs and the gradients that earlier operators made.
    """
    kinds = {entry.name: entry.kind for entry in program.inputs}
    resident = {
        node for node in program.graph.find_nodes(op="placeholder") if kinds[node.name] is not InputKind.TANGENT
    }
    wanted = {
        _base(node)
        for node, output in zip(program.output_nodes, program.outputs, strict=True)
        if isinstance(node, fx.Node) and output.kind is OutputKind.GRADIENT
    } - resident
    held = sum(map(_bytes, resident))
    made: set[fx.Node] = set()
    found = Least(held, 0, 0, "")
    for node in program.graph.nodes:
        if node.op != "call_function" or _is_part(node):
            made |= {node} & wanted
            continue
        if node.meta.get("phase") is Phase.BACKWARD:
            operands = {_base(operand) for operand in node.all_input_nodes} - resident - made
            candidate = Least(held, sum(map(_bytes, made)), sum(map(_bytes, operands)), str(node.target))
            found = max(found, candidate, key=lambda one: one.total_bytes)
        made |= {node} & wanted
    return found


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem or is_view(node)


def _base(node: fx.Node) -> fx.Node:
    """What owns the memory of a node's value."""
    while node.op == "call_function" and node.target is not operator.getitem and is_view(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
