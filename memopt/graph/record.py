"""Graphs as plain data: what a report keeps of a program at one moment of its compilation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from memopt.difference.graph_diff import GraphNode
from memopt.solve.liveness import profile

# Operators of nodes that are no step of the execution: they are there before it, name a part of a result, or end it.
NO_STEP = frozenset(("parameter", "buffer", "constant", "input", "tangent", "output", "getitem"))


@dataclasses.dataclass(frozen=True)
class NodeRecord:
    """One node.

    Attributes:
        id: tells the node from all others of the same compilation, before and after every pass. It is the node's name,
            with a number behind it where a pass gave a name that another node had before.
        name: in its graph.
        operator: `aten.relu`, `Conv`; "parameter", "buffer", "constant", "input", "tangent", "output" for others.
        inputs: ids of the nodes that it reads, in order.
        text: its arguments in words; input k is written %k, and a percent sign %%.
        result: the type of its value in words, `float32[2, 3]`.
        module: path of the model's module that made it; empty when it is not known.
        source: the user's source line as `file:line, code`; empty when it is not known.
        phase: "forward" or "backward" in a training program; else empty.
        flops: floating-point operations of one call; 0 where no formula is known.
        moved: bytes that one call reads and writes.
        origins: ids of the nodes that it stands for, as the pass that made it says.
    """

    id: str
    name: str
    operator: str
    inputs: tuple[str, ...] = ()
    text: str = ""
    result: str = ""
    module: str = ""
    source: str = ""
    phase: str = ""
    flops: int = 0
    moved: int = 0
    origins: tuple[str, ...] = ()

    def as_graph_node(self) -> GraphNode:
        """The node as `graph_diff` takes it, named by its id: there, equal names then mean the same node."""
        return GraphNode(self.id, self.operator, self.inputs, self.text, self.result, self.module, self.source)


@dataclasses.dataclass(frozen=True)
class StorageRecord:
    """Memory that the execution takes and gives back.

    Attributes:
        node: id of the node that makes it.
        bytes: what it takes of its device's allocator.
        start, end: the half-open span of steps in which it is alive.
    """

    node: str
    bytes: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class GraphRecord:
    """One graph, without any weights.

    Attributes:
        nodes: in order of execution.
        storages: everything but what is there all the time (weights, buffers, the caller's inputs).
        forward_steps: how many leading steps are forward; all of them in an inference program.
        unknown: why the memory is not known; empty where it is.
    """

    nodes: tuple[NodeRecord, ...]
    storages: tuple[StorageRecord, ...] = ()
    forward_steps: int = 0
    unknown: str = ""

    @property
    def steps(self) -> tuple[NodeRecord, ...]:
        """The nodes that run, in order: the unit of `StorageRecord.start` and `end`."""
        return tuple(node for node in self.nodes if node.operator not in NO_STEP)

    @property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes alive at each step, above what is resident and without operators' workspace."""
        spans = [(storage.start, storage.end, storage.bytes) for storage in self.storages]
        return tuple(profile(len(self.steps), spans).tolist())

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes alive at once; None where the memory is not known."""
        return None if self.unknown else max(self.live_bytes, default=0)

    @property
    def flops(self) -> int:
        """Floating-point operations of one run."""
        return sum(node.flops for node in self.nodes)

    @property
    def moved(self) -> int:
        """Bytes that all operations together read and write."""
        return sum(node.moved for node in self.nodes)


def identities(
    nodes: Sequence[GraphNode], history: Sequence[GraphRecord], changes: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> dict[str, str]:
    """An id for each node of a graph, by its name.

    A node is the one of the same name before, unless a pass gave the name of a node that it removed to another one:
    the operator is another and no change speaks of both, or a change replaced the old node and the new one differs.

    Args:
        nodes: of the graph, in order.
        history: the compilation's graphs so far, the one before last; empty: names are ids.
        changes: what the pass says: names of nodes before, and of those that stand for them.
    """
    if not history:
        return {node.name: node.name for node in nodes}
    known = {node.name: node for node in history[-1].nodes}
    names = {node.id: node.name for graph in history for node in graph.nodes}
    kept = {name for _, after in changes for name in after}
    replaced = {name for before, _ in changes for name in before} - kept
    found: dict[str, str] = {}
    for node in nodes:
        old = known.get(node.name)
        if old is not None:
            equal = (old.operator, old.text, [names[key] for key in old.inputs]) == (
                node.operator, node.text, list(node.inputs)
            )  # fmt: skip
            if node.name in kept or equal or (node.name not in replaced and old.operator == node.operator):
                found[node.name] = old.id
                continue
        fresh, number = node.name, 2
        while fresh in names:
            fresh, number = f"{node.name}~{number}", number + 1
        names[fresh] = node.name
        found[node.name] = fresh
    return found


def origins(
    ids: Mapping[str, str], earlier: GraphRecord | None, changes: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> dict[str, tuple[str, ...]]:
    """By name, the ids of the nodes before that a node stands for; a node that was there before keeps what it had."""
    if earlier is None:
        return {}
    found = {node.name: node.origins for node in earlier.nodes if ids.get(node.name) == node.id}
    before = {node.name: node.id for node in earlier.nodes}
    for old, new in changes:
        known = tuple(before[name] for name in old if name in before)
        for name in new:
            if name in ids and ids[name] != before.get(name):
                found[name] = tuple(dict.fromkeys((*found.get(name, ()), *known)))
    return found
