"""Two graphs side by side: which node of the one is which of the other, and what was removed, added or changed.

Plain data in and out: a node is a `GraphNode`, whatever it was read from. Nodes are aligned in turns, from the
strongest sign that two are one to the weakest; whatever one turn settles, the next builds on:

1. the same name and operator, where names are known to survive from the one graph to the other;
2. the same operation on the same inputs, all the way up (so that names do not matter);
3. the same operation with the same uses, all the way down;
4. the same operation in the same module in the same order between two aligned nodes;
5. the same operator with an aligned neighbour at the same place;
6. the same operator in the same module, then in any, in the same order between two aligned nodes.
"""

from __future__ import annotations

import bisect
import dataclasses
import difflib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Literal

Kind = Literal["same", "moved", "changed", "removed", "added"]

# Longer stretches between aligned nodes are not searched for a common sequence, which takes quadratic time.
_LONGEST_STRETCH = 2000
_INPUT = re.compile(r"%(%|\d+)")


@dataclasses.dataclass(frozen=True)
class GraphNode:
    """One node of a graph.

    Attributes:
        name: unique in its graph.
        operator: what it does: `aten.relu`, `Conv`; "parameter", "buffer", "constant", "input" or "output" for others.
        inputs: names of the nodes that it reads, in order.
        text: its arguments in words; input k is written %k, and a percent sign %%.
        result: the type of its value in words, `float32[2, 3]`; several are joined by a comma.
        module: the path of the model's module that made it (`stages.3.0.bn1`); empty when it is not known.
        source: the user's source line as `file:line, code`; empty when it is not known.
        value: a digest of the value of a parameter, buffer or constant; empty when it was not taken.
        bytes: of its result; 0 for views and where it is not known.
    """

    name: str
    operator: str
    inputs: tuple[str, ...] = ()
    text: str = ""
    result: str = ""
    module: str = ""
    source: str = ""
    value: str = ""
    bytes: int = 0

    def line(self, names: Mapping[str, str] | None = None) -> str:
        """The node as one line of text, with its inputs' names; `names` renames nodes."""
        known = names or {}

        def shown(match: re.Match[str]) -> str:
            if match[1] == "%":
                return "%"
            name = self.inputs[int(match[1])]
            return known.get(name, name)

        kind = f": {self.result}" if self.result else ""
        value = f"  # value {self.value}" if self.value else ""
        return f"{known.get(self.name, self.name)}{kind} = {self.operator}{_INPUT.sub(shown, self.text)}{value}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of two graphs side by side.

    Attributes:
        kind: "same"; "moved": the same in another place of the order (the row stands where it is now); "changed": one
            node with other arguments, inputs, result or value; "removed" and "added".
        before, after: positions in the lists of nodes; None on the side where there is none.
        why: what differs in a changed node, in words.
    """

    kind: Kind
    before: int | None
    after: int | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Alignment:
    """Two graphs side by side.

    Attributes:
        before, after: the nodes, in order of execution.
        rows: every node of both once (a pair in one row), in an order that both graphs follow but for moved nodes.
    """

    before: tuple[GraphNode, ...]
    after: tuple[GraphNode, ...]
    rows: tuple[Row, ...]

    @property
    def equal(self) -> bool:
        """Whether nothing but names and modules differs."""
        return all(row.kind == "same" for row in self.rows)

    def counts(self) -> dict[Kind, int]:
        """How many rows there are of each kind but "same"."""
        found = Counter(row.kind for row in self.rows)
        kinds: tuple[Kind, ...] = ("removed", "added", "changed", "moved")
        return {kind: found[kind] for kind in kinds}

    def by_operator(self) -> list[tuple[str, int, int]]:
        """Operator, nodes before and nodes after, for operators whose number differs; the largest change first."""
        old, new = (Counter(node.operator for node in side) for side in (self.before, self.after))
        rows = [(name, old[name], new[name]) for name in {*old, *new} if old[name] != new[name]]
        return sorted(rows, key=lambda row: (-abs(row[1] - row[2]), row[0]))


def align(before: Sequence[GraphNode], after: Sequence[GraphNode], *, names: bool = False) -> Alignment:
    """Align two graphs.

    Args:
        before, after: nodes in order of execution, inputs before their users.
        names: whether equal names mean the same node, as within one compilation; else names mean nothing.

    Raises:
        ValueError: two nodes of one graph have one name, or a node reads one that does not come before it.
    """
    matching = _Matching(before, after)
    if names:
        matching.equal_names()
    matching.equal_keys(_downward)
    matching.equal_keys(_upward)
    matching.in_order(lambda node: (node.module, node.operator, node.text, node.result))
    matching.neighbours()
    matching.in_order(lambda node: (node.module, node.operator))
    matching.in_order(lambda node: node.operator)
    matching.neighbours()
    return Alignment(tuple(before), tuple(after), tuple(matching.rows()))


# -- matching -----------------------------------------------------------------------------------------------------


class _Matching:
    def __init__(self, before: Sequence[GraphNode], after: Sequence[GraphNode]) -> None:
        self.sides = (before, after)
        self.places = tuple({node.name: index for index, node in enumerate(side)} for side in self.sides)
        for side, places in zip(self.sides, self.places, strict=True):
            if len(places) != len(side):
                raise ValueError("two nodes of a graph have the same name")
            for index, node in enumerate(side):
                for name in node.inputs:
                    if places.get(name, index) >= index:
                        raise ValueError(f"{node.name} reads {name}, which does not come before it")
        self.users = tuple(_users(side, places) for side, places in zip(self.sides, self.places, strict=True))
        self.partner: tuple[dict[int, int], dict[int, int]] = ({}, {})

    def join(self, a: int, b: int) -> None:
        self.partner[0][a] = b
        self.partner[1][b] = a

    def free(self, side: int) -> list[int]:
        return [index for index in range(len(self.sides[side])) if index not in self.partner[side]]

    def equal_keys(self, keys: Callable[[_Matching, int], list[int]]) -> None:
        """Join nodes of equal keys, in order, where both graphs have as many of them left."""
        groups: tuple[defaultdict[int, list[int]], ...] = (defaultdict(list), defaultdict(list))
        numbering: dict[Hashable, int] = {}
        self.numbering = numbering
        for side in (0, 1):
            found = keys(self, side)
            for index in self.free(side):
                groups[side][found[index]].append(index)
        for key, left in groups[0].items():
            right = groups[1].get(key, [])
            if len(left) == len(right):
                for a, b in zip(left, right, strict=True):
                    self.join(a, b)

    def equal_names(self) -> None:
        """Join nodes of the same name and operator."""
        for a in self.free(0):
            b = self.places[1].get(self.sides[0][a].name)
            if b is not None and b not in self.partner[1] and self.sides[1][b].operator == self.sides[0][a].operator:
                self.join(a, b)

    def in_order(self, token: Callable[[GraphNode], Hashable]) -> None:
        """Join nodes of equal tokens along the longest common sequence of each stretch between aligned nodes."""
        for left, right in list(self._stretches()):
            if not left or not right or max(len(left), len(right)) > _LONGEST_STRETCH:
                continue
            old, new = [token(self.sides[0][a]) for a in left], [token(self.sides[1][b]) for b in right]
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            for block in matcher.get_matching_blocks():
                for offset in range(block.size):
                    self.join(left[block.a + offset], right[block.b + offset])

    def neighbours(self) -> None:
        """Join nodes of the same operator that have an aligned input or user at the same place, and no rival."""
        work = [*self.partner[0].items()]
        while work:
            a, b = work.pop()
            for left, right in self._around(a, b):
                if len(left) == len(right) == 1:
                    self.join(left[0], right[0])
                    work.append((left[0], right[0]))

    def _around(self, a: int, b: int) -> Iterator[tuple[list[int], list[int]]]:
        """Free neighbours of an aligned pair by role: input number, or user's operator and argument number."""
        old, new = self.sides[0][a], self.sides[1][b]
        for one, other in zip(old.inputs, new.inputs, strict=False):
            left, right = self.places[0][one], self.places[1][other]
            free = left not in self.partner[0] and right not in self.partner[1]
            if free and self.sides[0][left].operator == self.sides[1][right].operator:
                yield [left], [right]
        roles: tuple[defaultdict[tuple[str, int], list[int]], ...] = (defaultdict(list), defaultdict(list))
        for side, index in ((0, a), (1, b)):
            for user, number in self.users[side][index]:
                if user not in self.partner[side]:
                    roles[side][self.sides[side][user].operator, number].append(user)
        for role, users in roles[0].items():
            yield (
                [user for user in users if user not in self.partner[0]],
                [user for user in roles[1].get(role, []) if user not in self.partner[1]],
            )

    def _stretches(self) -> Iterator[tuple[list[int], list[int]]]:
        """Free nodes between neighbouring pairs of the backbone, on both sides."""
        start = (0, 0)
        for pair in [*self._backbone(), (len(self.sides[0]), len(self.sides[1]))]:
            yield (
                [index for index in range(start[0], pair[0]) if index not in self.partner[0]],
                [index for index in range(start[1], pair[1]) if index not in self.partner[1]],
            )
            start = (pair[0] + 1, pair[1] + 1)

    def _backbone(self) -> list[tuple[int, int]]:
        """The most aligned pairs that stand in the same order in both graphs (the longest increasing subsequence)."""
        pairs = sorted(self.partner[0].items())
        ends: list[int] = []
        last: list[int] = []
        back: list[int] = []
        for index, (_, b) in enumerate(pairs):
            place = bisect.bisect_left(ends, b)
            back.append(last[place - 1] if place else -1)
            if place == len(ends):
                ends.append(b)
                last.append(index)
            else:
                ends[place], last[place] = b, index
        found: list[tuple[int, int]] = []
        index = last[-1] if last else -1
        while index >= 0:
            found.append(pairs[index])
            index = back[index]
        return found[::-1]

    def rows(self) -> Iterator[Row]:
        """Every node once: removed before added, each stretch before the pair that ends it."""
        backbone = self._backbone()
        start = (0, 0)
        for pair in [*backbone, (len(self.sides[0]), len(self.sides[1]))]:
            for a in range(start[0], pair[0]):
                if a not in self.partner[0]:
                    yield Row("removed", a, None)
            for b in range(start[1], pair[1]):
                a = self.partner[1].get(b, -1)
                if a < 0:
                    yield Row("added", None, b)
                else:
                    why = self._difference(a, b)
                    yield Row("changed" if why else "moved", a, b, why)
            if pair[0] < len(self.sides[0]) and pair[1] < len(self.sides[1]):
                why = self._difference(*pair)
                yield Row("changed" if why else "same", *pair, why)
            start = (pair[0] + 1, pair[1] + 1)

    def _difference(self, a: int, b: int) -> str:
        old, new = self.sides[0][a], self.sides[1][b]
        reads = [self.partner[0].get(self.places[0][name], -1) for name in old.inputs]
        found = []
        if reads != [self.places[1][name] for name in new.inputs]:
            found.append("inputs")
        found += ["arguments"] if old.text != new.text else []
        found += ["result"] if old.result != new.result else []
        found += ["value"] if old.value != new.value else []
        return ", ".join(found)


def _users(side: Sequence[GraphNode], places: Mapping[str, int]) -> list[list[tuple[int, int]]]:
    """Per node, who reads it and as which input."""
    users: list[list[tuple[int, int]]] = [[] for _ in side]
    for index, node in enumerate(side):
        for number, name in enumerate(node.inputs):
            users[places[name]].append((index, number))
    return users


def _downward(matching: _Matching, side: int) -> list[int]:
    """A number per node, equal for the same operation on inputs of the same numbers."""
    numbers: list[int] = []
    places = matching.places[side]
    for node in matching.sides[side]:
        key = (node.operator, node.text, node.result, tuple(numbers[places[name]] for name in node.inputs))
        numbers.append(matching.numbering.setdefault(key, len(matching.numbering)))
    return numbers


def _upward(matching: _Matching, side: int) -> list[int]:
    """A number per node, equal for the same operation with users of the same numbers at the same places."""
    nodes = matching.sides[side]
    numbers = [-1] * len(nodes)
    for index in range(len(nodes) - 1, -1, -1):
        node = nodes[index]
        users = tuple(sorted((numbers[user], number) for user, number in matching.users[side][index]))
        key = (node.operator, node.text, node.result, users)
        numbers[index] = matching.numbering.setdefault(key, len(matching.numbering))
    return numbers
