"""MergeCommon: compute equal values once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import ALLOWANCE, returned_storages, storages
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import Phase, Program, is_effectful, is_random


class MergeCommon(Pass):
    """Common subexpressions: two nodes that compute the same value become one, the earlier.

    Algebra: an operation is a function of its operands, so f(x, k) = f(x, k). Nodes are first numbered: two have the
    same number when they call the same operator on operands with the same numbers and on equal literals, where types
    count (1, 1.0 and True differ), -0.0 is not 0.0, and nan equals nan. Then, last to first, each node is replaced by
    the nearest earlier one with its number. Operator, operands and layouts are the same, so are the bits.

    Cases:
        1. A node is replaced by its twin, which takes over its users.
        2. A node whose users were all replaced by their own twins is removed with no further condition: a chain of
           equal nodes merges as one when its last value may.

    Memory: a twin that is read longer holds its memory longer. A merge is made where the peak cannot rise: the twin is
    still to be read when the node would recompute it, or both are views of one storage. Else the twin's bytes count
    against an allowance of 64 KiB for the whole program. So a mask or table that is cheap to make again and
    large to hold is recomputed, and scalars are shared.

    Refusals:
        - Nodes that draw random numbers, or have effects (higher-order operators among them), are never merged.
        - A merge that would hold more memory than the rule above allows.
        - A merge of a backward node with a forward one, unless both are views of one storage or backward reads the
          forward value anyway: to save one more tensor for backward is the planner's decision.
        - Two values that both reach the caller: it would get one tensor twice, and could write to one of them.
          Likewise one that reaches the caller and one that backward reads.
    """

    name: ClassVar[str] = "merge_common"

    def run(self, program: Program) -> PassResult:
        """Return the program with equal nodes merged; one change per node removed."""
        new = program.copy()
        merger = _Merger(new)
        merger.run()
        return PassResult.of(program, new, merger.changes(), merger.refusals[::-1])


class _Merger:
    """The merges of one program, decided from the last node to the first.

    In this order all that comes after a node is settled, so that `last` says truly whether a twin is read again later.
    """

    def __init__(self, program: Program) -> None:
        self.graph = program.graph
        self.position = {node: index for index, node in enumerate(self.graph.nodes)}
        self.returned = returned_storages(program)
        self.saved = _saved_storages(program)
        self.outputs = {value for value in program.output_nodes if isinstance(value, fx.Node)}
        self.twins = _twins(self.graph)
        self.dead = {node for node in self.graph.nodes if not node.users}  # left to eliminate_dead
        self.last: dict[fx.Node, int] = {}  # where a call that stays last reads the node, directly or through a view
        self.allowance = ALLOWANCE
        self.merged: dict[str, str] = {}
        self.refusals: list[Refusal] = []

    def run(self) -> None:
        for node in reversed(list(self.graph.nodes)):
            twin = self.twins.get(node)
            if twin is not None and node not in self.dead and self._merge(node, twin):
                continue
            if node.op == "call_function":
                self._keep(node)

    def changes(self) -> tuple[Change, ...]:
        """One change per removed node, in the order of the graph; a twin's own twin stands for it where it went too."""
        found = []
        for name, twin in reversed(self.merged.items()):
            while twin in self.merged:
                twin = self.merged[twin]
            found.append(Change(f"{name} is {twin}", (name,), (twin,)))
        return tuple(found)

    def _merge(self, node: fx.Node, twin: fx.Node) -> bool:
        if node.users:
            reason = self._reason_against(node, twin)
            if reason is not None:
                self.refusals.append(Refusal(node.name, f"equals {twin.name}, but {reason}"))
                return False
            self.last[twin] = max(self.last.get(twin, -1), self.last.get(node, -1))
            for flagged in (self.returned, self.saved):
                if flagged & storages(node).keys():
                    flagged.update(storages(twin))
            if node in self.outputs:
                self.outputs.add(twin)
            node.replace_all_uses_with(twin)
        self.graph.erase_node(node)
        self.merged[node.name] = twin.name
        return True

    def _keep(self, node: fx.Node) -> None:
        own = storages(node).keys()
        for argument in node.all_input_nodes:
            read = self.position[node]
            if own & storages(argument).keys():
                read = max(read, self.last.get(node, -1))
            self.last[argument] = max(self.last.get(argument, -1), read)

    def _reason_against(self, node: fx.Node, twin: fx.Node) -> str | None:
        if is_random(node):
            return "each draws random numbers of its own"
        if is_effectful(node):
            return f"{node.target} does more than compute its value"
        mine, theirs = storages(node).keys(), storages(twin).keys()
        if node in self.outputs and twin in self.outputs:
            return "both are outputs, which must stay two tensors"
        if mine == theirs:
            return None
        if self.returned & mine and self.returned & theirs:
            return "both reach the caller, who may write to one of them"
        if (self.returned & mine and self.saved & theirs) or (self.saved & mine and self.returned & theirs):
            return "one reaches the caller, who may write to it, and backward reads the other"
        read_later = self.last.get(twin, -1) > self.position[node]
        if twin.meta.get("phase") is not node.meta.get("phase"):
            if read_later and node.meta.get("phase") is Phase.BACKWARD:
                return None
            return "it belongs to forward: one more tensor would have to be saved for backward"
        if read_later or twin in self.outputs:
            return None
        nbytes = sum(storages(twin).values())
        if nbytes > self.allowance:
            return f"{nbytes} bytes would be held from its last use to here, where they can be recomputed"
        self.allowance -= nbytes
        return None


def _saved_storages(program: Program) -> set[int]:
    """Keys of the storages that forward makes and backward reads."""
    made: set[int] = set()
    saved: set[int] = set()
    for node in program.calls:
        if node.meta.get("phase") is Phase.FORWARD:
            made |= storages(node).keys()
        elif node.meta.get("phase") is Phase.BACKWARD:
            saved |= {key for argument in node.all_input_nodes for key in storages(argument)} & made
    return saved


def _twins(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each call node to the nearest earlier node that computes the same value."""
    numbers: dict[fx.Node, int] = {}
    latest: dict[Hashable, fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        key = _key(node, numbers) if node.op == "call_function" else None
        twin = None if key is None else latest.get(key)
        if key is not None:
            latest[key] = node
        unique = twin is None or is_random(node) or is_effectful(node)
        numbers[node] = len(numbers) if unique else numbers[twin]  # type: ignore[index]
        if twin is not None:
            twins[node] = twin
    return twins


def _key(node: fx.Node, numbers: dict[fx.Node, int]) -> Hashable | None:
    """What the node computes, as a value that is equal for equal computations; None when it cannot be compared."""
    try:
        return node.target, _literal(node.args, numbers), _literal(node.kwargs, numbers)
    except _NotComparable:
        return None


class _NotComparable(Exception):
    """An argument is of a type without a known equality (a generator, a symbolic size)."""


def _literal(value: Any, numbers: dict[fx.Node, int]) -> Hashable:
    if isinstance(value, fx.Node):
        return "node", numbers[value]
    if isinstance(value, (list, tuple)):
        return "sequence", tuple(_literal(item, numbers) for item in value)
    if isinstance(value, dict):
        return "mapping", tuple((key, _literal(value[key], numbers)) for key in sorted(value))
    if type(value) is float:
        return "float", value.hex()
    if type(value) is complex:
        return "complex", value.real.hex(), value.imag.hex()
    if value is None or type(value) in (bool, int, str, torch.dtype, torch.device, torch.layout, torch.memory_format):
        return type(value).__name__, value
    raise _NotComparable(type(value).__name__)
