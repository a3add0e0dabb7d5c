"""What is computed beside a window's kernels: it reads what they read, and takes the memory of what it reads last."""

from __future__ import annotations

import operator
from collections.abc import Collection, Container, Iterable, Mapping

from torch import fx

from memopt.inductor.fusion import stored_reads
from memopt.inductor.kinds import REDUCTIONS
from memopt.memory.cost.roofline import result_bytes
from memopt.program import InputKind, Program, is_any_view

# A kernel shares reads with others where these are at least so large a part of what it makes.
_SHARED = 2


class StoredReads:
    """What is stored of a program as Inductor would have it, and where it is read.

    Attributes:
        operands: of each stored value, the stored values that making it reads.
        readers: of each stored value, the stored values that are made of it, and the graph's output.
        kernels: what kernels that Inductor generates store.
        stays: what the caller has: outputs, and inputs other than tangents.
        sizes: bytes of each stored value.
    """

    def __init__(self, program: Program) -> None:
        """Take a program in any order of its operations."""
        graph = program.graph
        reads, fused, calls = stored_reads(graph)
        self.operands: dict[fx.Node, frozenset[fx.Node]] = {}
        self.readers: dict[fx.Node, list[fx.Node]] = {}
        self.kernels: set[fx.Node] = set()
        self.sizes: dict[fx.Node, int] = {}
        for node in graph.nodes:
            if node in fused or is_any_view(node):
                continue
            found = frozenset[fx.Node]().union(*(reads[argument] for argument in node.all_input_nodes))
            self.operands[node] = found
            for operand in found:
                self.readers.setdefault(operand, []).append(node)
            if node.op == "call_function" and node not in calls and node.target is not operator.getitem:
                self.kernels.add(node)
            in_items = any(user.target is operator.getitem for user in node.users)
            self.sizes[node] = 0 if in_items or node.op == "output" else result_bytes(node)
        self.stays = set(self.operands.pop(graph.output_node()))
        for node in graph.find_nodes(op="placeholder"):
            if program.input_of(node.name).kind is not InputKind.TANGENT:
                self.stays.add(node)


class Beside:
    """Finds the kernels that belong into a window."""

    def __init__(self, stored: StoredReads) -> None:
        """Take what is stored, and where it is read."""
        self._operands, self._readers, self._sizes = stored.operands, stored.readers, stored.sizes
        self._kernels, self._stays = stored.kernels, stored.stays

    def found(self, window: Iterable[fx.Node], done: Container[fx.Node], place: Mapping[fx.Node, int]) -> list[fx.Node]:
        """The kernels to compute with a window that is complete otherwise, in their order.

        Args:
            window: what is computed there.
            done: what of the phase is there then.
            place: the whole phase, by place.
        """
        kernels = [node for node in window if node in self._kernels]
        there = {value for node in kernels for value in (node, *self._operands[node])}
        chosen: set[fx.Node] = set()
        work = [*there]
        for value in work:
            for node in self._readers.get(value, ()):
                if node in chosen or not self._fits(node, there, chosen, done, place):
                    continue
                chosen.add(node)
                work += [node, *(self._operands[node] - there)]
                there.update((node, *self._operands[node]))
        ordered = sorted(chosen, key=place.__getitem__)
        while ordered and not self._pays(ordered, done, place):
            ordered.pop()
        return ordered

    def _fits(
        self,
        node: fx.Node,
        there: Collection[fx.Node],
        chosen: Collection[fx.Node],
        done: Container[fx.Node],
        place: Collection[fx.Node],
    ) -> bool:
        """Whether it can be computed now, and reads much of what is read there anyway."""
        if node not in place or node in done or node not in self._kernels or node.target in REDUCTIONS:
            return False
        operands = self._operands[node]
        if any(value in place and value not in done and value not in chosen for value in operands):
            return False
        return sum(self._sizes[value] for value in operands if value in there) * _SHARED >= self._sizes[node]

    def _pays(self, chosen: Collection[fx.Node], done: Container[fx.Node], place: Collection[fx.Node]) -> bool:
        """Whether what these kernels read last is as large as what they make."""
        read = frozenset[fx.Node]().union(*(self._operands[node] for node in chosen))
        freed = sum(
            self._sizes[value]
            for value in read
            if value not in self._stays
            and value not in chosen
            and all(node in chosen or node in done or node not in place for node in self._readers[value])
        )
        return freed >= sum(self._sizes[node] for node in chosen)
