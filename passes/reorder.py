"""Reorder: the order of execution with the smallest peak."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import ClassVar

from torch import fx

from memopt.graph.rewrite import forget_inplace
from memopt.memory.aliasing import Aliasing, analyse, owner
from memopt.memory.over_operands import may_overwrite
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Program, is_effectful, is_random
from memopt.solve.order import Order, OrderProblem, live_bytes, smallest_peak


class Reorder(Pass):
    """Runs the operations of an inference program in the order with the smallest peak of live bytes.

    Algebra: the program is functional, so any order that keeps every operation after the ones whose values it reads
    computes the same values. Bytes are counted by storage: a view keeps its base alive, outputs stay to the end,
    inputs are not counted, and an element-wise result that `Inplace` may write over a dying operand needs no memory of
    its own.

    1. The order is proved best: dynamic programming over the sets of operations that have run reached the end.
    2. The order is better than the one given, but not proved best: a refusal names the gap.

    Operations that draw random numbers or have effects keep their order among each other. Items of a multiple result
    follow their operation. In-place annotations are forgotten where the order changes: they were
    proved for the old one.

    Refused: training programs (their order is chosen together with what is recomputed), silently; and what is not
    proved best, with the node at the peak and both figures.
    """

    name: ClassVar[str] = "reorder"
    tolerance: ClassVar[float] = 0.0

    def __init__(self, *, workspace: Mapping[str, int] | None = None, effort: int = 50_000) -> None:
        """Set what is known and how hard to search.

        Args:
            workspace: bytes that a node needs only while it runs, by node name.
            effort: moves that the exact search may try (see `memopt.solve.order.smallest_peak`).
        """
        self.workspace, self.effort = dict(workspace or {}), effort

    def run(self, program: Program) -> PassResult:
        """Return the program in the better order, or the same program when none was found."""
        if program.training:
            return PassResult(program)
        lowered = lower_order(program, self.workspace)
        order = smallest_peak(lowered.problem, effort=self.effort)
        before = max(live_bytes(lowered.problem, range(len(lowered.operations))), default=0)
        refusals = _gap(lowered, order)
        if order.peak_bytes >= before:
            return PassResult(program, (), refusals)
        steps = [lowered.operations[k] for k in order.steps]
        moved = tuple(steps[i].name for i, k in enumerate(order.steps) if k != (order.steps[i - 1] + 1 if i else 0))
        proof = "no order needs less" if order.optimal else f"no order needs less than {order.lower_bound}"
        change = Change(f"another order peaks at {order.peak_bytes} bytes in place of {before}; {proof}", moved, moved)
        return PassResult(in_order(program, steps), (change,), refusals)


@dataclasses.dataclass(frozen=True)
class LoweredOrder:
    """A program in numbers: operation k of the problem is `operations[k]`, its storages are those of `aliasing`."""

    problem: OrderProblem
    operations: tuple[fx.Node, ...]
    aliasing: Aliasing


def lower_order(program: Program, workspace: Mapping[str, int] | None = None) -> LoweredOrder:
    """Describe an inference program's order as a problem of plain numbers; in-place annotations are not looked at.

    Args:
        program: an inference program.
        workspace: bytes that a node needs only while it runs, by node name.
    """
    plain = program
    if any("inplace" in node.meta for node in program.calls):
        plain = program.copy()
        forget_inplace(plain.graph)
        plain = plain.finish()
    aliasing = analyse(plain)
    operations = tuple(node for node in plain.calls if node.target is not operator.getitem)
    number = {node: k for k, node in enumerate(operations)}
    counted = {s.index for s in aliasing.storages if s.producer.op == "call_function"}
    touches: list[dict[int, None]] = [{} for _ in operations]
    after: list[dict[int, None]] = [{} for _ in operations]
    last_effect: int | None = None
    for node in plain.calls:
        k = number[owner(node)]
        for value in (node, *node.all_input_nodes):
            touches[k].update(dict.fromkeys(s for s in aliasing.of.get(value, ()) if s in counted))
        after[k].update(
            (number[owner(value)], None)
            for value in node.all_input_nodes
            if value.op == "call_function" and owner(value) is not owner(node)
        )
        if node in number and (is_random(node) or is_effectful(node)):
            if last_effect is not None:
                after[k][last_effect] = None
            last_effect = k
    returned = {s for value in plain.output_nodes if isinstance(value, fx.Node) for s in aliasing.of[value]}
    problem = OrderProblem(
        sizes=tuple(storage.nbytes for storage in aliasing.storages),
        touches=tuple(tuple(sorted(found)) for found in touches),
        after=tuple(tuple(sorted(found)) for found in after),
        workspace=tuple((workspace or {}).get(node.name, 0) for node in operations),
        pinned=frozenset(returned & counted),
        takes=tuple(_takes(node, aliasing, counted - returned) for node in operations),
    )
    by_name = {node.name: node for node in program.calls}
    return LoweredOrder(problem, tuple(by_name[node.name] for node in operations), aliasing)


def in_order(program: Program, operations: list[fx.Node]) -> Program:
    """A copy of the program that runs its operations in the given order, without in-place annotations."""
    new = program.copy()
    copies = {node.name: node for node in new.graph.nodes}
    forget_inplace(new.graph)
    output = new.graph.output_node()
    for node in operations:
        output.prepend(copies[node.name])
        work = [copies[node.name]]
        while work:  # items of items too
            items = [user for user in work.pop().users if user.target is operator.getitem]
            for item in items:
                output.prepend(item)
            work += items
    return new.finish()


def _takes(node: fx.Node, aliasing: Aliasing, allowed: set[int]) -> int:
    """The storage that the node's result may be written over, if the node is its last reader; -1 for none."""
    if not may_overwrite(node):
        return -1
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    storage = aliasing.of[operand][0]
    others = [value for value in node.all_input_nodes if value is not operand]
    if storage not in allowed or any(storage in aliasing.of[value] for value in others):
        return -1
    return storage


def _gap(lowered: LoweredOrder, order: Order) -> tuple[Refusal, ...]:
    if order.optimal:
        return ()
    live = live_bytes(lowered.problem, order.steps)
    node = lowered.operations[order.steps[live.index(order.peak_bytes)]]
    reason = f"the order peaks here at {order.peak_bytes} bytes, and is only proved to need {order.lower_bound}"
    return (Refusal(node.name, reason),)
