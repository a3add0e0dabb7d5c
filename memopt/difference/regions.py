"""Where two programs differ: the smallest parts of each that must be compared to prove them equal."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import fx

from memopt.graph import fake_calls
from memopt.memory.aliasing import owner
from memopt.program import Program, describe, is_random, tensors_of
from memopt.step.encode_step import OTHER_FORM_RESULTS, again_form
from memopt.step.own_copies import OWN_COPY
from memopt.torch_compat import pytree

_POOLS = {
    torch.ops.aten.max_pool2d_with_indices.default,
    torch.ops.aten.max_pool3d_with_indices.default,
}


@dataclasses.dataclass(frozen=True)
class Region:
    """A part of two programs with the same inputs and the same results.

    Attributes:
        before: the nodes of the old program, in order of execution.
        after: the nodes of the new program, in order of execution.
        results: pairs of nodes, old and new, whose values must agree.
        bytes: of all results of all its nodes and of its inputs, old and new together.
        structure: equal for regions that compute the same on tensors of the same shapes.
        inputs_before, inputs_after: what each part reads from outside, by node, with numbers that are equal for equal
            values.
    """

    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    results: tuple[tuple[fx.Node, fx.Node], ...]
    bytes: int
    structure: str
    inputs_before: dict[fx.Node, int]
    inputs_after: dict[fx.Node, int]


def differing_regions(before: Program, after: Program, *, cut: bool = True, context: int = 0) -> list[Region]:
    """Cut out the regions in which the programs differ and that are not equal by construction.

    Values are numbered: two nodes have the same number when they apply the same operator to operands of the same
    numbers, and a node that has the same name and the same operands by name keeps its number. What the numbers
    prove (merged, moved, removed and recomputed nodes) needs no run. Around each other node a region is grown
    backwards until both sides read the same values, indices of pooling with the pooling itself. A node that
    recomputes another by a different operator is a region of its own.

    With `cut`, a node that has the same name in both programs is taken for the same value, which its own region has to
    prove: a chain of rewrites becomes many small regions. A rewrite may give an old name to another value; without
    `cut` names mean nothing, and the chain is one region. With `context`, each region also takes in as many layers of
    the operations before it, for rewrites that rest on what those guarantee (relu of relu6).
    """
    numbering = _Numbering()
    old = {node.name: node for node in before.graph.nodes if node.op != "output"}
    new = {node.name: node for node in after.graph.nodes if node.op != "output"}
    old_number = numbering.number(old, {})
    same = {name: old_number[name] for name, node in new.items() if _is_same(node, old.get(name))}
    twin = {number: name for name, number in reversed(old_number.items())}
    new_number = numbering.number(new, same)
    unproved = dict.fromkeys(  # in order, so that the same ones of equal regions are run in every process
        name
        for name, number in new_number.items()
        if _is_call(new[name]) and (number not in twin or old_number.get(name, number) != number)
    )
    points = dict.fromkeys(name for name in unproved if cut and name in old and not _is_item_of(new[name], unproved))
    if points:
        new_number = numbering.number(new, {**same, **{name: old_number[name] for name in points}})
        unproved = dict.fromkeys(name for name in unproved if name in points or new_number[name] not in twin)
    pairs = [
        (a, b)
        for a, b in zip(before.output_nodes, after.output_nodes, strict=True)
        if isinstance(a, fx.Node) and isinstance(b, fx.Node)
    ]
    groups = _Groups(unproved)
    for name in unproved:
        for argument in new[name].all_input_nodes:
            if argument.name in unproved and argument.name not in points:
                groups.join(name, argument.name)
    grown = _Growth(old, new, old_number, new_number, context)
    regions = []
    for members in groups.all():
        results = [(old[name], new[name]) for name in members if name in points]
        if not cut:
            results = [(old[name], new[name]) for name in members if name in old and _read_outside(new[name], members)]
        results += [(a, b) for a, b in pairs if b.name in members]
        if results:
            regions.append(grown.region(members, results))
    regions += [
        grown.region({b.name}, [(a, b)])
        for a, b in pairs
        if b.name not in unproved and old_number[a.name] != new_number[b.name]
    ]
    return regions + _recomputed_otherwise(old, new, new_number, old_number)


class _Numbering:
    """Value numbers, shared by both programs."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, nodes: dict[str, fx.Node], known: dict[str, int]) -> dict[str, int]:
        numbers: dict[str, int] = {}
        draws = 0
        for name, node in nodes.items():
            draws += is_random(node)
            if OWN_COPY in node.meta:
                numbers[name] = numbers[node.all_input_nodes[0].name]
            elif name in known:
                numbers[name] = known[name]
            else:
                numbers[name] = self._numbers.setdefault(self._key(node, numbers, draws), len(self._numbers))
        return numbers

    def _key(self, node: fx.Node, numbers: dict[str, int], draws: int) -> str:
        if node.op != "call_function":
            return f"{node.op} {node.name}"
        target, args = node.target, node.args
        if target is operator.getitem:
            form = again_form(args[0])  # type: ignore[arg-type]
            if form is not None and form[0] is not args[0].target and args[1] < OTHER_FORM_RESULTS:  # type: ignore[union-attr,operator]
                return f"{self._call(*form, {}, numbers)}[{args[1]}]"
            if form is not None:
                return f"{self._call(*form, args[0].kwargs, numbers)}[{args[1]}]"  # type: ignore[union-attr]
        drawn = f"draw {draws} " if is_random(node) else ""
        return drawn + self._call(target, args, node.kwargs, numbers)

    def _call(self, target: object, args: object, kwargs: object, numbers: dict[str, int]) -> str:
        named: Any = fx.map_arg((args, kwargs), lambda n: _Number(numbers[n.name]))  # type: ignore[type-var]
        return f"{target}{named}"


class _Number(int):
    """A value number among plain arguments: printed apart from the integers."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class _Growth:
    def __init__(
        self,
        old: dict[str, fx.Node],
        new: dict[str, fx.Node],
        old_number: dict[str, int],
        new_number: dict[str, int],
        context: int,
    ) -> None:
        self.old, self.new, self.old_number, self.new_number, self.context = old, new, old_number, new_number, context
        self._places = tuple({name: place for place, name in enumerate(side)} for side in (old, new))

    def region(self, members: Iterable[str], results: list[tuple[fx.Node, fx.Node]]) -> Region:
        """Grow both sides of a region until they read the same values."""
        after = _whole_results(set(members), self.new)
        given = _reads(after, self.new, self.new_number)  # a copy's result is among these: nothing before has to run
        before = _whole_results({a.name for a, _ in results if self.old_number[a.name] not in given}, self.old)
        layers = self.context
        while True:
            read_after = _reads(after, self.new, self.new_number)
            read_before = _reads(before, self.old, self.old_number)
            read_before.update({self.old_number[a.name]: a.name for a, _ in results if a.name not in before})
            grow_before = {n for v, n in read_before.items() if v not in read_after and _is_call(self.old[n])}
            grow_after = {n for v, n in read_after.items() if v not in read_before and _is_call(self.new[n])}
            if not grow_before and not grow_after:
                indices = {n for n in read_before.values() if _is_index(self.old[n])}
                if indices:
                    before = _whole_results(before | indices, self.old)
                    found = {n for n in read_after.values() if _is_index(self.new[n])}
                    after = _whole_results(after | found, self.new)
                    continue
                if not layers:
                    break
                layers -= 1
                before = _whole_results(before | {n for n in read_before.values() if _is_call(self.old[n])}, self.old)
                after = _whole_results(after | {n for n in read_after.values() if _is_call(self.new[n])}, self.new)
                continue
            # Growing the side that is ahead of the other one first keeps the region small.
            if grow_before:
                before = _whole_results(before | grow_before, self.old)
            else:
                after = _whole_results(after | grow_after, self.new)
        old_part, new_part = (
            tuple(side[name] for name in sorted(filter(side.__contains__, names), key=places.__getitem__))
            for side, names, places in zip((self.old, self.new), (before, after), self._places, strict=True)
        )
        return _region(old_part, new_part, tuple(results), self.new_number, self.old_number)


def _reads(names: set[str], side: dict[str, fx.Node], numbers: dict[str, int]) -> dict[int, str]:
    """What the named nodes read from outside, by value number."""
    return {
        numbers[argument.name]: argument.name
        for name in names
        if name in side
        for argument in side[name].all_input_nodes
        if argument.name not in names
    }


def _whole_results(names: set[str], side: dict[str, fx.Node]) -> set[str]:
    """The names, with every multiple result taken whole."""
    found: set[str] = set()
    for name in names:
        top = owner(side[name])
        if _is_call(top):
            found.add(top.name)
            found.update(user.name for user in top.users if user.target is operator.getitem)
        found.add(name)
    return found


def _is_item_of(node: fx.Node, names: Collection[str]) -> bool:
    """Whether the node is an item of a multiple result among the names: such a result is compared item by item."""
    return any(user.target is operator.getitem for user in node.users) and node.name in names


def _read_outside(node: fx.Node, members: Collection[str]) -> bool:
    return any(user.op != "output" and user.name not in members for user in node.users)


def _recomputed_otherwise(
    old: dict[str, fx.Node], new: dict[str, fx.Node], new_number: dict[str, int], old_number: dict[str, int]
) -> list[Region]:
    """One region for each node that computes another's value again by a different operator."""
    regions = []
    for node in new.values():
        original = old.get(node.meta.get("recomputes", ""))
        if original is None or node.op != "call_function" or node.target in (original.target, operator.getitem):
            continue
        items = {user.args[1]: user for user in original.users if user.target is operator.getitem}
        results = [
            (items[user.args[1]], user)
            for user in node.users
            if user.target is operator.getitem and user.args[1] in items
        ]
        before, after = (original, *items.values()), (node, *node.users)
        after = tuple(n for n in after if owner(n) is node)
        regions.append(_region(before, after, tuple(results), new_number, old_number))
    return regions


def _is_index(node: fx.Node) -> bool:
    """Whether the node is an index that pooling made: a made-up one would lie outside its window."""
    return node.target is operator.getitem and bool(node.args[1] == 1) and owner(node).target in _POOLS


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function"


def _is_same(node: fx.Node, other: fx.Node | None) -> bool:
    """Whether both are one call by name, an item of one such call too."""
    if other is None or _differs(node, other):
        return False
    top, before = owner(node), owner(other)
    return (top is node and before is other) or not _differs(top, before)


def _differs(node: fx.Node, other: fx.Node | None) -> bool:
    if other is None or node.target is not other.target or node.meta.get("inplace") != other.meta.get("inplace"):
        return True
    call = fake_calls.behind(node)
    if call is not None and call is fake_calls.behind(other):  # all arguments are the same but for who is read
        pairs = zip(fake_calls.operands_of(node), fake_calls.operands_of(other), strict=True)
        return any(mine.name != theirs.name for mine, theirs in pairs)
    return repr((node.args, node.kwargs)) != repr((other.args, other.kwargs))


class _Groups:
    """Union-find over names."""

    def __init__(self, names: Iterable[str]) -> None:
        self._parent = {name: name for name in names}

    def _root(self, name: str) -> str:
        while self._parent[name] != name:
            self._parent[name] = self._parent[self._parent[name]]
            name = self._parent[name]
        return name

    def join(self, a: str, b: str) -> None:
        self._parent[self._root(a)] = self._root(b)

    def all(self) -> list[dict[str, None]]:
        """The members of each group, in order."""
        found: dict[str, dict[str, None]] = {}
        for name in self._parent:
            found.setdefault(self._root(name), {})[name] = None
        return list(found.values())


def _region(
    before: tuple[fx.Node, ...],
    after: tuple[fx.Node, ...],
    results: tuple[tuple[fx.Node, fx.Node], ...],
    new_number: dict[str, int],
    old_number: dict[str, int],
) -> Region:
    size = 0
    inputs: list[dict[fx.Node, int]] = []
    for part, numbers, side in ((before, old_number, 0), (after, new_number, 1)):
        inside = set(part)
        read = dict.fromkeys(argument for node in part for argument in node.all_input_nodes if argument not in inside)
        read |= dict.fromkeys(pair[side] for pair in results if pair[side] not in inside)
        inputs.append({argument: numbers[argument.name] for argument in read})
        for value in (*part, *read):
            size += sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))
    structure = _structure(before) + "=>" + _structure(after)
    return Region(before, after, results, size, structure, inputs[0], inputs[1])


def _structure(part: tuple[fx.Node, ...]) -> str:
    """The part's operators, wiring and shapes, with names replaced by positions."""
    number: dict[fx.Node, str] = {}
    lines = []
    for node in part:
        for argument in node.all_input_nodes:
            if argument not in number:
                number[argument] = f"i{len(number)}:{[describe(tensor) for tensor in tensors_of(argument)]}"
        args, kwargs = pytree.tree_map_only(fx.Node, lambda n: number[n], (node.args, node.kwargs))
        lines.append(f"{node.target}{args}{kwargs}")
        number[node] = f"n{len(number)}"
    return ";".join(lines)
