"""Inplace: a result takes the storage of an operand that dies there and is read index by index."""

from __future__ import annotations

import operator
from typing import ClassVar

from torch import fx

from memopt.graph.rewrite import forget_inplace
from memopt.memory.aliasing import Aliasing, analyse
from memopt.memory.over_operands import may_overwrite, read_otherwise
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Phase, Program

_MOST_REFUSALS = 50


class Inplace(Pass):
    """Annotates element-wise nodes whose result may be written over their first operand.

    Algebra: result[i] = f(x[i], ...) reads index i of its operands only, so it may be written to x's memory index by
    index, if nobody reads x afterwards. The graph stays functional: `meta["inplace"] = 0` says that the result takes
    the storage of argument 0, and a backend that follows it calls the overload that `inplace_overload` gives. A matrix
    product that is added to x reads x so, and its factors in another way.

    A node is annotated when

    1. its operator is element-wise, or `addmm`, draws no random numbers, and has an in-place form (see
       `inplace_overload`);
    2. its result has the shape, strides, dtype and device of argument 0, which fills its whole storage without overlap;
    3. no later node reads any value in that storage: views, items of multiple results and values that took the same
       storage before are found by the identity of storages, not by names;
    4. other arguments in the same storage have the same geometry (`x * x`, never `x + x.t()`); of `addmm` none is.

    Refused, with the reason, for nodes that meet 1 and 2: the storage belongs to an input (of any kind) or to an
    output, is read later, is read by the node itself in another geometry, or was made in forward while the node is in
    backward (autograd owns saved tensors, and may run backward twice on them). At most 50 refusals are kept, of the
    largest nodes. Annotations from earlier runs are forgotten first. A program with values that are annotated as fused
    is left as it is: the engine that fuses them reuses memory by itself.
    """

    name: ClassVar[str] = "inplace"
    tolerance: ClassVar[float] = 0.0

    def run(self, program: Program) -> PassResult:
        """Return the program with fresh annotations; one change per annotated node."""
        if any(node.meta.get("fused") for node in program.calls):
            return PassResult(program)
        new = program.copy()
        forget_inplace(new.graph)
        found, refusals = _Finder(new).find()
        before = {node.name: node.meta["inplace"] for node in program.calls if "inplace" in node.meta}
        if before == {node.name: 0 for node in found}:
            return PassResult(program, (), refusals)
        for node in found:
            node.meta["inplace"] = 0
        changes = [
            Change(f"{node.name} takes the storage of {node.args[0]}", (node.name,), (node.name,)) for node in found
        ]
        kept = {node.name for node in found}
        changes += [
            Change(f"{name} no longer takes the storage of an operand", (name,), (name,))
            for name in before
            if name not in kept
        ]
        return PassResult(new.finish(), tuple(changes), refusals)


def takes_storage(node: fx.Node) -> fx.Node | None:
    """The operand whose storage the node's result takes over; None when the result has a storage of its own."""
    if "inplace" not in node.meta:
        return None
    operand = node.args[node.meta["inplace"]]
    assert isinstance(operand, fx.Node)
    return operand


class _Finder:
    """Decides node by node, in order of execution; storages that were taken over count as one from then on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.position = {node: index for index, node in enumerate(program.graph.nodes)}
        self.aliasing: Aliasing = analyse(program)
        count = len(self.aliasing.storages)
        self.taken_from = list(range(count))
        self.readers: list[fx.Node | None] = [None] * count  # per storage, its last reader
        for node, indices in self.aliasing.of.items():
            for user in node.users:
                if user.target is not operator.getitem:
                    for index in indices:
                        self.readers[index] = self._later(self.readers[index], user)

    def _later(self, a: fx.Node | None, b: fx.Node | None) -> fx.Node | None:
        if a is None or b is None:
            return a or b
        return a if self.position[a] >= self.position[b] else b

    def _storage(self, index: int) -> int:
        while self.taken_from[index] != index:
            index = self.taken_from[index]
        return index

    def find(self) -> tuple[list[fx.Node], tuple[Refusal, ...]]:
        """The nodes to annotate, and the near misses."""
        found: list[fx.Node] = []
        refused: list[tuple[int, int, Refusal]] = []
        for node in self.program.calls:
            if not may_overwrite(node):
                continue
            mine, theirs = self.aliasing.of[node][0], self._storage(self.aliasing.of[node.args[0]][0])  # type: ignore[index]
            reason = self._reason_against(node, theirs)
            if reason is not None:
                size = self.aliasing.storages[mine].nbytes
                refused.append((-size, self.position[node], Refusal(node.name, reason)))
                continue
            self.taken_from[mine] = theirs
            self.readers[theirs] = self._later(self.readers[theirs], self.readers[mine])
            found.append(node)
        kept = sorted(refused)[:_MOST_REFUSALS]
        return found, tuple(refusal for _, _, refusal in sorted(kept, key=lambda item: item[1]))

    def _reason_against(self, node: fx.Node, storage: int) -> str | None:
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        producer = self.aliasing.storages[storage].producer
        if producer.op != "call_function":
            return f"{operand.name} lives in the memory of the input {producer.name}"
        reader = self.readers[storage]
        assert reader is not None
        if reader.op == "output":
            return f"the memory of {operand.name} is returned to the caller"
        if self.position[reader] > self.position[node]:
            return f"the memory of {operand.name} is read later, by {reader.name}"
        if node.meta.get("phase") is Phase.BACKWARD and producer.meta.get("phase") is not Phase.BACKWARD:
            return f"{operand.name} is a saved tensor: backward may run again on it"
        return read_otherwise(node, lambda other: map(self._storage, self.aliasing.of[other]), storage)
