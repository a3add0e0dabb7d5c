"""The order of a backward graph in which Inductor's kernels fuse well: what reads the same values stands together.

A plan's code is fused between two library calls only (see `order.KeepOrder`), in windows. As autograd gives it, the
sum of two gradients stands in another window than the kernel that reads it, the sum over rows that is a bias's gradient
in another than the kernel that makes the rows, and what the gradient of a weight reads in another than the kernel that
reads the same once more: each is a pass over memory of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from memopt.inductor.kinds import REDUCTIONS, is_inlined, is_library_call
from memopt.memory.cost.roofline import result_bytes
from memopt.program import Phase, Program, is_any_view, is_effectful, is_random

# Library calls by which an operation is put off at most: its operands wait as long.
_FAR = 8
# An operation whose result is so many times smaller than its operands is not put off.
_SHRINKS = 4


def arrange(program: Program) -> Program:
    """Return the program with its backward graph in an order of few windows.

    1. Every library call that others depend on keeps its place among these, and so does what has effects or draws
       random numbers.
    2. What is computed element by element stands directly before the first library call that depends on it, unless
       it makes much less of its operands, or that call is far.
    3. What the caller gets of that, a gradient of a bias say, stands beside it.
    4. A call on which no other depends (the gradient of a weight) waits for the next kernels where it reads what is
       computed element by element in forward: recomputed, that is fused with them. What it keeps waiting must be
       no larger than what they read together. What is made of its result alone waits with it.
    """
    if not program.training:
        return program
    new = program.copy()
    arranged = _Arrangement(new.graph).nodes()
    output = new.graph.output_node()
    for node in arranged:
        output.prepend(node)
    new.graph_module.recompile()
    return new


class _Arrangement:
    def __init__(self, graph: fx.Graph) -> None:
        self.given = [n for n in graph.nodes if n.op == "call_function" and n.meta.get("phase") is Phase.BACKWARD]
        self.place = {node: index for index, node in enumerate(self.given)}
        self.fixed = {node for node in self.given if is_effectful(node) or is_random(node)}  # in their own order
        self.call = {node: node in self.fixed or is_library_call(node) for node in self.given}
        self.feeds: dict[fx.Node, bool] = {}  # whether a library call depends on it
        self.before: dict[fx.Node, int] = {}  # library calls before it
        self.needed: dict[fx.Node, int] = {}  # library calls before the first one that depends on it
        self.done: dict[fx.Node, None] = {}
        self.waiting: list[fx.Node] = []
        calls = 0
        for node in self.given:
            self.before[node] = calls
            calls += self.call[node]
        for node in reversed(self.given):
            users = [user for user in node.users if user in self.place]
            first = (self.before[user] if self.call[user] else self.needed[user] for user in users)
            self.needed[node] = min(first, default=calls)
            self.feeds[node] = any(self.call[user] or self.feeds[user] for user in users)

    def nodes(self) -> Iterable[fx.Node]:
        """The backward graph, in its new order."""
        for node in self.given:
            if node in self.done:
                continue
            if not self.call[node]:
                if self._follows_what_waits(node):
                    self.waiting.append(node)
                elif not self._is_put_off(node):
                    self._run(node)
            elif self.feeds[node] or node in self.fixed or not self._waits(node):
                self._run_call(node)
            else:
                self.waiting.append(node)
        for node in self.given:
            self._run(node)
        return self.done

    def _run_call(self, node: fx.Node) -> None:
        """The window before the call, what waits for one, and the call."""
        window = self._missing(node)[:-1]
        for item in window:
            self._put(item)
        if any(not is_any_view(item) for item in window):
            self._run_results(window)
            for item in self.waiting:
                self._run(item)
            self.waiting.clear()
        self._put(node)

    def _run(self, node: fx.Node) -> None:
        for item in self._missing(node):
            self._put(item)

    def _missing(self, node: fx.Node) -> list[fx.Node]:
        """What is yet to run before the node, and the node: in the order that was given."""
        found: set[fx.Node] = set()
        work = [node]
        while work:
            item = work.pop()
            if item in self.place and item not in self.done and item not in found:
                found.add(item)
                work.extend(item.all_input_nodes)
        return sorted(found, key=self.place.__getitem__)

    def _put(self, node: fx.Node) -> None:
        self.done[node] = None
        for user in node.users:
            if user.target is operator.getitem and user not in self.done:
                self._put(user)

    def _run_results(self, window: Iterable[fx.Node]) -> None:
        """What is computed of the window, and on which no library call depends."""
        work = list(window)
        for item in work:
            for user in item.users:
                if user not in self.place or user in self.done or self.call[user] or self.feeds[user]:
                    continue
                if all(operand in self.done or operand not in self.place for operand in user.all_input_nodes):
                    self._put(user)
                    work.append(user)

    def _follows_what_waits(self, node: fx.Node) -> bool:
        """Whether it is made of a call that waits: autocast's float32 copy of a weight's gradient, say."""
        if self.feeds[node] or not self.waiting:
            return False
        return not set(self.waiting).isdisjoint(self._missing(node))

    def _is_put_off(self, node: fx.Node) -> bool:
        if is_any_view(node):
            return True
        if not self.feeds[node] or node.target is operator.getitem or node.target in REDUCTIONS:
            return False
        read = sum(result_bytes(operand) for operand in node.all_input_nodes if operand in self.place)
        return self.needed[node] - self.before[node] <= _FAR and result_bytes(node) * _SHRINKS >= read

    def _waits(self, node: fx.Node) -> bool:
        held = shared = 0
        for operand in node.all_input_nodes:
            while operand.op == "call_function" and is_any_view(operand):
                operand = operand.all_input_nodes[0]
            if operand in self.place:
                held += result_bytes(operand)
            elif operand.op == "call_function" and is_inlined(operand):
                shared += max(result_bytes(item) for item in (operand, *operand.all_input_nodes))
        return shared >= held > 0
