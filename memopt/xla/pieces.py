"""A graph cut into pieces that run one after another, each freeing what it was the last to read."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection

import torch
from torch import fx

from memopt.program import is_random, is_view


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """Part of a graph.

    Attributes:
        module: a graph of its own, whose placeholders and results stand for values of the whole.
        reads: names of the values that it takes, in order.
        writes: names of the values that it gives, in order.
        frees: names of values that nothing reads after it.
    """

    module: fx.GraphModule
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    frees: tuple[str, ...]


def cut(module: fx.GraphModule, size: int) -> list[Piece]:
    """Cut a graph every `size` operators, in its own order.

    What crosses a cut is a tensor that owns its storage: views are rebuilt in each piece that reads them, so that a
    cut never copies a tensor for the sake of its shape. Slices are taken where their source is made if nothing else is
    read of it: then what crosses is the slices.

    Args:
        module: a graph whose results are nodes or plain values.
        size: operators in a piece, views not counted; 0: one piece.
    """
    slices = _slices(module)
    derived = {node for node in module.graph.nodes if _is_derived(node)} - slices.keys()
    groups: list[list[fx.Node]] = [[]]
    count = 0
    for node in module.graph.nodes:
        if node.op not in ("call_function", "get_attr") or node in slices:
            continue
        work = node.op == "call_function" and node not in derived
        if size and work and count and count % size == 0:
            groups.append([])
        count += work
        groups[-1].append(node)
    results = [leaf for leaf in module.graph.output_node().args[0] if isinstance(leaf, fx.Node)]  # type: ignore[union-attr]
    home: dict[fx.Node, int] = {}
    for number, group in enumerate(groups):
        for node in group:  # an item of several results is made where they are
            home[node] = home[node.args[0]] if node.target is operator.getitem else number  # type: ignore[index]
    for node, source in slices.items():
        home[node] = home[source]
        groups[home[node]].append(node)
    built = [_Build(module, number, home, derived) for number in range(len(groups))]
    for build, group in zip(built, groups, strict=True):
        for node in group:
            if node not in derived:
                build.add(node)
    for node in dict.fromkeys(results):
        if node.op != "placeholder":
            built[home[node]].give(node)
    for build in built:
        for node in list(build.reads):
            if node.op != "placeholder":
                built[home[node]].give(node)
    kept = {node.name for node in results}
    last: dict[str, int] = {}
    for number, build in enumerate(built):
        last.update({node.name: number for node in (*build.reads, *build.writes)})
    return [
        build.finish(tuple(name for name, place in last.items() if place == number and name not in kept))
        for number, build in enumerate(built)
    ]


def _is_derived(node: fx.Node) -> bool:
    """Whether the node is made anew wherever it is read: a view, an item of several results, a constant."""
    return node.op == "get_attr" or node.target is operator.getitem or (is_view(node) and not is_random(node))


def _slices(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Views of parts of a tensor of which nothing else is read, and which together are no larger, with that tensor."""
    found: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        size = value_bytes(node)
        if node.op != "call_function" or not size or (_is_derived(node) and node.target is not operator.getitem):
            continue
        if all(_is_part(user, size) for user in node.users) and sum(map(value_bytes, node.users)) <= size:
            found.update(dict.fromkeys(node.users, node))
    return found


def _is_part(node: fx.Node, size: int) -> bool:
    return node.op == "call_function" and is_view(node) and not is_random(node) and 0 < value_bytes(node) < size


def value_bytes(node: fx.Node) -> int:
    """Bytes of a node's value; 0 for what is no tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


class _Build:
    """One piece while it is put together."""

    def __init__(
        self, module: fx.GraphModule, number: int, home: dict[fx.Node, int], derived: Collection[fx.Node]
    ) -> None:
        self.module, self.number, self.home, self.derived = module, number, home, derived
        self.graph = fx.Graph()
        self.inside: dict[fx.Node, fx.Node] = {}
        self.reads: dict[fx.Node, fx.Node] = {}
        self.writes: dict[fx.Node, fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        """Run a node here, unless what came before has asked for it."""
        for argument in node.all_input_nodes:
            self.value(argument)
        if node not in self.inside:
            self._copy(node)

    def value(self, node: fx.Node) -> fx.Node:
        """The node's value here: made here, rebuilt from what it is a view of, or taken from another piece."""
        if node in self.inside:
            return self.inside[node]
        crosses = node.op == "placeholder" or (self.home[node] != self.number and not self._again(node))
        if crosses:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                made = self.graph.placeholder(node.name)
            made.meta = dict(node.meta)
            self.inside[node] = self.reads[node] = made
            return made
        for argument in node.all_input_nodes:
            self.value(argument)
        return self._copy(node)

    def _again(self, node: fx.Node) -> bool:
        """Whether a value of an earlier piece is rebuilt here: it is a view, but no item of what was run there."""
        if node.op == "get_attr":
            return True
        if node not in self.derived:
            return False
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        return node.target is not operator.getitem or (source in self.derived and source.target is not operator.getitem)

    def _copy(self, node: fx.Node) -> fx.Node:
        copied = self.graph.node_copy(node, lambda n: self.inside[n])
        copied.meta = dict(node.meta)
        self.inside[node] = copied
        return copied

    def give(self, node: fx.Node) -> None:
        """Let a value be one of the piece's results."""
        self.writes[node] = self.value(node)

    def finish(self, frees: tuple[str, ...]) -> Piece:
        """The piece, its placeholders in the order of what it reads."""
        order = [node for node in self.graph.nodes if node.op == "placeholder"]
        names = {made: node.name for node, made in self.reads.items()}
        result = self.graph.output(tuple(self.writes.values()))
        result.meta = {}
        self.graph.lint()
        module = fx.GraphModule(self.module, self.graph)
        return Piece(module, tuple(names[made] for made in order), tuple(n.name for n in self.writes), frees)
