"""A rewrite in part: a program with some of the places changed in which two programs differ.

What differs is cut into parts: the regions of `memopt.difference.regions` (what lies outside of them is equal by
construction), annotations of in-place results, and values of constants. Each part can be taken over by itself, whatever
pass made it.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.difference.graph_diff import align
from memopt.difference.program_nodes import graph_nodes
from memopt.difference.regions import Region, differing_regions
from memopt.graph.rewrite import forget_inplace
from memopt.graph.weights import same_source
from memopt.pass_manager import Change
from memopt.program import InputKind, Phase, Program, ProgramError, describe, is_effectful, is_random, tensors_of


@dataclasses.dataclass(frozen=True)
class Part:
    """One place in which two programs differ.

    Attributes:
        before: names of the nodes of the first program that it replaces or changes.
        after: names of the nodes of the second that stand for them.
        region: the part of both graphs; None for an annotation or a value.
        inplace: the name of a node whose in-place annotation differs; empty otherwise.
        state: the name of an input whose value in `state` differs; empty otherwise.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    region: Region | None = None
    inplace: str = ""
    state: str = ""


class Tangled(Exception):
    """The chosen parts cannot be taken over without others."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Two programs, and the places in which they differ.

    Attributes:
        before: a program.
        after: what a pass made of it, with nodes called as those that they stand for.
        parts: in the order of `after`; they name its nodes as the pass did.
        names: what the pass called nodes of `after` that have another name there.
    """

    before: Program
    after: Program
    parts: tuple[Part, ...]
    names: Mapping[str, str]


def cut(before: Program, after: Program, changes: Sequence[Change] = (), *, by_name: bool = True) -> Cut:
    """Find the places in which the programs differ.

    Args:
        before, after: a program, and what a pass made of it.
        changes: what the pass says of it: where one node is said to stand for another, both are taken for one value.
        by_name: whether nodes that have one name in both, stand for each other by `changes`, or are aligned by
            `graph_diff` are taken for the same value. It makes more and smaller parts; where that is wrong, parts are
            right only together.
    """
    theirs: dict[str, str] = {}
    if by_name:
        names = _standing_for(before, after, changes)
        after = _renamed(after, names)
        theirs = {old: new for new, old in names.items()}
    place = {node.name: index for index, node in enumerate(after.graph.nodes)}
    found = []
    for region in differing_regions(before, after, cut=by_name):
        old = tuple(node.name for node in region.before)
        new = tuple(theirs.get(node.name, node.name) for node in region.after)
        last = max((place[node.name] for node in region.after), default=-1)
        found.append((last, Part(old, new, region)))
    parts = [part for _, part in sorted(found, key=lambda entry: entry[0])]
    old_marks, new_marks = _marks(before), _marks(after)
    for name in place:
        if name in old_marks and name in new_marks and old_marks[name] != new_marks[name]:
            parts.append(Part((name,), (theirs.get(name, name),), inplace=name))
    for name in before.state.keys() & after.state.keys():
        old_value, new_value = before.state[name], after.state[name]
        if not same_source(before.state, after.state, name) and not _equal(old_value, new_value):
            parts.append(Part((name,), (name,), state=name))
    return Cut(before, after, tuple(parts), theirs)


def transplant(whole: Cut, chosen: Sequence[Part]) -> Program:
    """The first program with the chosen parts as they are in the second.

    Raises:
        Tangled: these parts do not make a program without others.
    """
    if not chosen:
        return whole.before
    program = _Surgery(whole).operate(chosen)
    try:
        program = program.finish()
        program.check()
    except (ProgramError, RuntimeError) as error:
        raise Tangled(str(error)) from error
    return program


def _standing_for(before: Program, after: Program, changes: Sequence[Change]) -> dict[str, str]:
    """By name in `after`, the name in `before` of the node that a node stands for, where that name is free."""
    old = {node.name: node for node in before.calls}
    new = {node.name: node for node in after.calls}
    found: dict[str, str] = {}

    def join(one: str, other: str) -> None:
        free = one in old and one not in new and other in new and other not in old
        if not free or other in found or one in found.values():
            return
        if [describe(t) for t in tensors_of(old[one])] == [describe(t) for t in tensors_of(new[other])]:
            found[other] = one

    for change in changes:
        if change.before and change.after:
            join(change.before[-1], change.after[-1])
    told = {name for change in changes for name in (*change.before, *change.after)}
    aligned = align(graph_nodes(before), graph_nodes(after), names=True)
    for row in aligned.rows:
        if row.before is None or row.after is None:
            continue
        one, other = aligned.before[row.before].name, aligned.after[row.after].name
        if one not in told and other not in told:  # where the pass speaks there is nothing to be guessed
            join(one, other)
    return found


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    """The program with some call nodes under other names, which are free."""
    if not names:
        return program
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: mapping[n])
        name = names.get(node.name, node.name)
        mapping[node] = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        mapping[node].meta = dict(node.meta)
    return dataclasses.replace(program, graph_module=fx.GraphModule(program.graph_module, graph))


class _Surgery:
    def __init__(self, whole: Cut) -> None:
        self.after, self.names = whole.after, whole.names
        self.program = whole.before.copy()
        self.nodes = {node.name: node for node in self.program.graph.nodes}
        self.key: dict[fx.Node, tuple[float, int]] = {
            node: (float(index), 0) for index, node in enumerate(self.program.graph.nodes)
        }
        self.stand_in: dict[str, fx.Node] = {}  # of nodes of the first program that a region replaced
        self.drawn = itertools.count(1)

    def operate(self, chosen: Sequence[Part]) -> Program:
        kept = {node.name for node in self.after.graph.nodes}
        doomed: list[fx.Node] = []
        regions = [part.region for part in chosen if part.region is not None]
        for region in regions:
            doomed += self._replace(region)
            doomed += [self.nodes[node.name] for node in region.before if node.name not in kept]
            doomed += [self.nodes[old.name] for old, _ in region.results]
        self._erase(doomed, {self.nodes[node.name] for region in regions for node in region.before})
        if regions:
            forget_inplace(self.program.graph)
        marks = _marks(self.after)
        for part in chosen:
            if part.inplace:
                node = self.nodes[part.inplace]
                node.meta = {key: value for key, value in node.meta.items() if key != "inplace"}
                if marks[part.inplace] is not None:
                    node.meta["inplace"] = marks[part.inplace]
            elif part.state:
                state = {**self.program.state, part.state: self.after.state[part.state]}
                self.program = dataclasses.replace(self.program, state=state)
        return self._in_order()

    def _replace(self, region: Region) -> list[fx.Node]:
        """Copy a region's new nodes beside the old ones, and let who read the old results read them; return them."""
        graph = self.program.graph
        by_number = {number: node.name for node, number in region.inputs_before.items()}
        made: dict[fx.Node, fx.Node] = {}
        key = min((self.key[self.nodes[old.name]] for old, _ in region.results), default=(0.0, 0))[0]

        def source(node: fx.Node) -> fx.Node:
            if node in made:
                return made[node]
            name = by_number.get(region.inputs_after[node])
            if name is None and node.op == "placeholder":
                return self._input(node)
            if name is None:
                raise Tangled(f"{node.name} is not there yet")
            found: fx.Node = self.stand_in.get(name, self.nodes[name])
            return found

        end = graph.output_node()
        originals = {node.name: node for node in region.before}
        shared: set[fx.Node] = set()  # what the region takes in only for the sake of its proof

        def is_shared(node: fx.Node) -> bool:
            same = originals.get(node.name)
            if same is None or same.target is not node.target:
                return False
            if repr((same.args, same.kwargs)) != repr((node.args, node.kwargs)):
                return False
            return all(
                argument in shared or by_number.get(region.inputs_after.get(argument, -1)) == argument.name
                for argument in node.all_input_nodes
            )

        for node in region.after:
            if is_shared(node):
                shared.add(node)
                made[node] = self.stand_in.get(node.name, self.nodes[node.name])
                continue
            args, kwargs = fx.map_arg((node.args, node.kwargs), source)
            with graph.inserting_before(end):
                name = self.names.get(node.name, node.name)
                copied = graph.create_node(node.op, node.target, args, kwargs, name, node.type)
            copied.meta = dict(node.meta)
            made[node] = copied
            # Before the node whose value it gives; those of one region in their own order.
            self.key[copied] = (key - 0.5, next(self.drawn))
        copies = [made[node] for node in made if node not in shared]
        for old, new in region.results:
            target = self.nodes[old.name]
            given = made[new] if new in made else source(new)
            if given is target:
                continue
            own = frozenset(copies)
            target.replace_all_uses_with(given, lambda user, own=own: user not in own)
            self.stand_in[old.name] = given
        return copies

    def _input(self, node: fx.Node) -> fx.Node:
        """The placeholder of this name: one that is there, or a new constant."""
        known: fx.Node | None = self.nodes.get(node.name)
        if known is not None:
            return known
        entry = self.after.input_of(node.name)
        if entry.kind is not InputKind.CONSTANT:
            raise Tangled(f"{node.name} is a new input")
        graph, last = self.program.graph, self.program.placeholders
        with graph.inserting_after(last[-1]) if last else graph.inserting_before(next(iter(graph.nodes))):
            made = graph.placeholder(node.name)
        made.meta = dict(node.meta)
        if made.name != node.name:
            raise Tangled(f"the name {node.name} is taken")
        self.nodes[node.name] = made
        self.key[made] = (-1.0, next(self.drawn))
        self.program = dataclasses.replace(
            self.program,
            inputs=(*self.program.inputs, entry),
            state={**self.program.state, node.name: self.after.state[node.name]},
        )
        return made

    def _erase(self, doomed: Sequence[fx.Node], regions: set[fx.Node]) -> None:
        """Erase what nobody reads any more of the nodes that the regions replaced."""
        work = list(doomed)
        gone: set[fx.Node] = set()
        while work:
            node = work.pop()
            if node in gone or node.users or node.op != "call_function" or is_effectful(node):
                continue
            work += [argument for argument in node.all_input_nodes if argument in regions]
            gone.add(node)
            self.program.graph.erase_node(node)

    def _in_order(self) -> Program:
        """The program with its nodes where they can be computed, as near to their old places as that allows."""
        nodes = list(self.program.graph.nodes)
        waiting = {node: len(node.all_input_nodes) for node in nodes}
        output = self.program.graph.output_node()
        number = {node: index for index, node in enumerate(nodes)}
        heap = [(self._rank(node), number[node], node) for node in nodes if not waiting[node]]
        heapq.heapify(heap)
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        while heap:
            _, _, node = heapq.heappop(heap)
            if node is not output:
                mapping[node] = graph.node_copy(node, lambda n: mapping[n])
                mapping[node].meta = dict(node.meta)
            for user in node.users:
                waiting[user] -= 1
                if not waiting[user] and user is not output:
                    heapq.heappush(heap, (self._rank(user), number[user], user))
        if len(mapping) != len(nodes) - 1:
            raise Tangled("a node would need its own result")
        draws = [self.key[node] for node in mapping if is_random(node)]
        if draws != sorted(draws):
            raise Tangled("random numbers would be drawn in another order")
        result: Any = graph.output(fx.map_arg(output.args[0], lambda n: mapping[n]))
        result.meta = dict(output.meta)
        renamed = {node.name: mapping[node].name for node in mapping if node.op == "placeholder"}
        entries = {entry.name: entry for entry in self.program.inputs}
        names = [node.name for node in mapping if node.op == "placeholder"]
        if any(name != renamed[name] for name in names):
            raise Tangled("an input lost its name")
        return dataclasses.replace(
            self.program,
            graph_module=fx.GraphModule(self.program.graph_module, graph),
            inputs=tuple(entries[name] for name in names),
            baked=self.program.baked | self.after.baked,
        )

    def _rank(self, node: fx.Node) -> tuple[int, float, int]:
        if node.op == "placeholder":
            constant = self.program.input_of(node.name).kind is InputKind.CONSTANT
            return (0 if not constant or self.key[node][0] >= 0 else 1, *self.key[node])
        return (3 if node.meta.get("phase") is Phase.BACKWARD else 2, *self.key[node])


def _marks(program: Program) -> dict[str, int | None]:
    """In-place annotations of the call nodes, by name."""
    return {node.name: node.meta.get("inplace") for node in program.calls}


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    same = one.dtype == other.dtype and one.shape == other.shape
    return same and torch.equal(one, other)
