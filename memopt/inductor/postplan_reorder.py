"""The order of a planned backward graph in which kernels that read the same values are one.

A plan recomputes what is missing just before it is read, and what it recomputes stands between kernels that
were one in the order that was planned. What is known only now is which values those are, and how much memory is left.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from memopt.inductor.coscheduling import Beside, StoredReads
from memopt.inductor.kinds import is_library_call
from memopt.program import Phase, Program, is_effectful, is_random

# Library calls by which the gradient of a weight is put off at most.
_FAR = 4


def together(program: Program) -> list[fx.Node] | None:
    """The backward graph of a planned program in an order in which kernels read and write less; None where it is in it.

    1. Library calls that run again come before the kernels, between two others, that do not feed them.
    2. What reads the same as a window's kernels, once it can be computed, stands beside them.
    3. The gradient of a weight that reads what is computed for it alone is put off with that, to kernels that read the
       same.

    Each is done where the memory stays below the most that backward takes anyway.
    """
    if not program.training:
        return None
    given = [n for n in program.graph.nodes if n.op == "call_function" and n.meta.get("phase") is Phase.BACKWARD]
    stored = StoredReads(program)
    found = _Order(given, stored)
    _run_again_first(found)
    _bring_beside(found)
    _put_off(found)
    return None if found.nodes == given else found.nodes


class _Order:
    """An order of the backward graph that only ever gets better.

    Attributes:
        nodes: the graph in its present order.
        place: where each node stands.
        stored: what is stored, and where it is read.
    """

    def __init__(self, given: Sequence[fx.Node], stored: StoredReads) -> None:
        self.nodes, self.stored = [*given], stored
        self.place = {node: index for index, node in enumerate(given)}
        self._last = {  # where what does not stay is read last
            value: max(read)
            for value, readers in stored.readers.items()
            if value not in stored.stays and (read := [self.place[node] for node in readers if node in self.place])
        }
        # Bytes before each node, above what is there throughout.
        there = sum(stored.sizes[value] for value in self._last if value not in self.place)
        self._before, live = self._play(given, there, 0)
        self._limit = max(live, default=0)

    def becomes(self, start: int, nodes: Sequence[fx.Node]) -> bool:
        """Take nodes in place of as many from `start` on, if kernels move less so, and the peak is no higher."""
        end = start + len(nodes)
        low, high = start, end  # windows that change are whole
        while low and not is_library_call(self.nodes[low - 1]):
            low -= 1
        while high < len(self.nodes) and not is_library_call(self.nodes[high]):
            high += 1
        around = [*self.nodes[low:start], *nodes, *self.nodes[end:high]]
        if _moved(around, self.stored) >= _moved(self.nodes[low:high], self.stored):
            return False
        if _in_order(nodes) != _in_order(self.nodes[start:end]):
            return False
        inside = {node: index for index, node in enumerate(nodes, start)}
        for node, index in inside.items():
            if any(inside.get(item, self.place.get(item, -1)) >= index for item in node.all_input_nodes):
                return False
        last = dict(self._last)
        for node in nodes:
            for value in self.stored.operands.get(node, ()):
                if value in last and start <= last[value] < end:
                    last[value] = -1
        for node, index in inside.items():
            for value in self.stored.operands.get(node, ()):
                if value in last and last[value] < end:
                    last[value] = max(last[value], index)
        kept, self._last = self._last, last
        before, live = self._play(nodes, self._before[start], start)
        if max(live) > self._limit:
            self._last = kept
            return False
        self.nodes[start:end], self._before[start:end] = nodes, before
        self.place.update(inside)
        return True

    def moves(self, nodes: Collection[fx.Node], behind: fx.Node) -> bool:
        """Move nodes behind another one, if that is better; return whether it was done."""
        at, places = self.place[behind], [self.place[node] for node in nodes]
        start, end = min(*places, at + 1), max(*places, at) + 1
        group = [node for node in self.nodes[start:end] if node in nodes]
        rest = [node for node in self.nodes[start:end] if node not in nodes]
        cut = rest.index(behind) + 1 if behind in rest else 0
        return self.becomes(start, [*rest[:cut], *group, *rest[cut:]])

    def _play(self, nodes: Sequence[fx.Node], live: int, start: int) -> tuple[list[int], list[int]]:
        """Bytes before and while each node runs, from `start` on; a kernel writes over what it reads last."""
        stored, before, most = self.stored, list[int](), list[int]()
        for index, node in enumerate(nodes, start):
            freed = sum(stored.sizes[v] for v in stored.operands.get(node, ()) if self._last.get(v) == index)
            made = stored.sizes.get(node, 0) if node in self._last or node in stored.stays else 0
            before.append(live)
            most.append(live + made - (min(freed, made) if node in stored.kernels else 0))
            live += made - freed
        return before, most


def _in_order(nodes: Sequence[fx.Node]) -> Sequence[fx.Node]:
    """What keeps its order: random numbers are drawn in it; and everything, where something has effects."""
    if any(map(is_effectful, nodes)):
        return [*nodes]
    return [node for node in nodes if is_random(node)]


class _Until:
    """The graph up to a place, as a collection."""

    def __init__(self, place: Mapping[fx.Node, int], last: int) -> None:
        self._place, self._last = place, last

    def __contains__(self, node: object) -> bool:
        return self._place.get(node, self._last + 1) <= self._last  # type: ignore[call-overload, no-any-return]


def _run_again_first(order: _Order) -> None:
    start = 0
    for stretch in [*_stretches(order.nodes)]:
        other = _again_first(stretch)
        if other != stretch:
            order.becomes(start, other)
        start += len(stretch)


def _bring_beside(order: _Order) -> None:
    beside = Beside(order.stored)
    for window in _windows(order.nodes, order.stored):
        last = max(window, key=order.place.__getitem__)
        at = order.place[last]
        found = beside.found(window, _Until(order.place, at), order.place)
        while found and not order.moves(_with_missing(found, order.place, at), last):
            found.pop()


def _put_off(order: _Order) -> None:
    stored = order.stored
    feeds: set[fx.Node] = set()  # what a library call depends on
    for node in reversed(order.nodes):
        if any(user in feeds or is_library_call(user) for user in node.users):
            feeds.add(node)
    for call in [node for node in order.nodes if is_library_call(node) and node not in feeds]:
        own = [item for item in stored.operands[call] if item in stored.kernels and stored.readers[item] == [call]]
        if len(own) != 1 or own[0] not in order.place:
            continue
        group = _for_alone(own[0], call, order.place)
        for window in _windows(_ahead(order.nodes, order.place[call] + 1), stored):
            shared = any(stored.operands[kernel] & stored.operands[own[0]] for kernel in window)
            if shared and order.moves(group, window[-1]):
                break


def _ahead(nodes: Sequence[fx.Node], start: int) -> list[fx.Node]:
    """What comes from a place on, up to some library calls away."""
    found, calls = list[fx.Node](), 0
    for index in range(start, len(nodes)):
        calls += is_library_call(nodes[index])
        if calls > _FAR:
            break
        found.append(nodes[index])
    return found


def _windows(nodes: Sequence[fx.Node], stored: StoredReads) -> list[list[fx.Node]]:
    """Kernels between two library calls."""
    found: list[list[fx.Node]] = [[]]
    for node in nodes:
        if is_library_call(node):
            found.append([])
        elif node in stored.kernels:
            found[-1].append(node)
    return [window for window in found if window]


def _with_missing(nodes: Sequence[fx.Node], place: Mapping[fx.Node, int], behind: int) -> set[fx.Node]:
    """The nodes, and what they depend on that stands behind a place."""
    found: set[fx.Node] = set()
    work = [*nodes]
    while work:
        node = work.pop()
        if node not in found and place.get(node, -1) > behind:
            found.add(node)
            work += node.all_input_nodes
    return found


def _for_alone(value: fx.Node, call: fx.Node, place: Mapping[fx.Node, int]) -> set[fx.Node]:
    """A value and the call that reads it, with all that only they depend on."""
    found = {value, call}
    work = [*call.all_input_nodes, *value.all_input_nodes]
    while work:
        node = work.pop()
        if node in place and node not in found and not is_library_call(node) and found.issuperset(node.users):
            found.add(node)
            work += node.all_input_nodes
    return found


def _runs_again(node: fx.Node) -> bool:
    return "recomputes" in node.meta and is_library_call(node)


def _stretches(given: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """The graph cut behind every library call that is not one that runs again, and what belongs to it."""
    stretch: list[fx.Node] = []
    for node, after in itertools.zip_longest(given, given[1:]):  # a graph may be empty
        stretch.append(node)
        ends = is_library_call(node) and not _runs_again(node)
        if (ends or is_effectful(node) or is_random(node)) and (after is None or after.target is not operator.getitem):
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _again_first(stretch: Sequence[fx.Node]) -> list[fx.Node]:
    """The stretch with each library call that runs again, and what it depends on, as early as it can be."""
    first: set[fx.Node] = set()
    for node in reversed(stretch):
        made = node.all_input_nodes[0] if node.target is operator.getitem else node
        if _runs_again(made) or any(user in first for user in node.users):
            first.add(node)
    return [*(node for node in stretch if node in first), *(node for node in stretch if node not in first)]


def _moved(stretch: Sequence[fx.Node], stored: StoredReads) -> int:
    """Bytes that the kernels of a stretch read and write, each window's once."""
    total, window = 0, set[fx.Node]()
    for node in stretch:
        if is_library_call(node):
            total += sum(stored.sizes[value] for value in window)
            window = set()
        elif node in stored.kernels:
            window.update((node, *stored.operands[node]))
    return total + sum(stored.sizes[value] for value in window)
