"""Stretches of a training step around its heaviest convolutions that can run on some samples of the batch at a time."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.patterns.batch import Batched, NotBatched, Rule, State, Summed
from memopt.patterns.batch_gradients import gradient_rule
from memopt.program import InputKind, Program, is_effectful, is_random

aten = torch.ops.aten

CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
# What is filled with one number.
FILLED = aten.full.default
# A convolution is heavy that needs this share of what the program's greediest operation needs by itself; stretches
# begin and end with operations that need this smaller one: lighter ones between them cost less in parts than putting
# together what they read and make.
_HEAVY, _LIGHT = 1 / 4, 1 / 8
_SHARED = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT)


@dataclasses.dataclass(frozen=True)
class Span:
    """Operations of one phase of a step that run together on some samples at a time.

    Attributes:
        members: in order; what each makes of the batch is in `rules`.
        rules: by member.
        early: between them, but independent of them: they can run before.
        late: between them, made of their sums over the batch: they can run after.
    """

    members: tuple[fx.Node, ...]
    rules: Mapping[fx.Node, Rule]
    early: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class Spans:
    """What was found in a training program.

    Attributes:
        size: samples of the batch.
        spans: in order.
        outside: how values lie along the batch where they are read from outside of the span that makes them.
        reasons: by operation at which a span had to end beside a heavy one, why.
    """

    size: int
    spans: tuple[Span, ...]
    outside: Mapping[fx.Node, State]
    reasons: Mapping[fx.Node, str]


def find_spans(program: Program, size: int, own: Mapping[fx.Node, int]) -> Spans:
    """Find the longest stretches around heavy convolutions in which each sample is computed from that sample alone.

    Dimension 0 of whatever has `size` entries there is the batch, of values from outside of a stretch; what is proved
    holds for any dimension so named, since any tensor may be cut.

    Args:
        program: a training program.
        size: samples of the batch.
        own: by call node, bytes that it needs whatever else is kept.
    """
    most = max(own.values(), default=0)
    finder = _Finder(_outside(program, size), size, own, most * _LIGHT)
    heavy = {node for node in program.calls if node.target in CONVOLUTIONS and own[node] >= most * _HEAVY}
    calls, position, spans = program.calls, 0, []
    while position < len(calls):
        _, stop = finder.run(calls, position, len(calls))
        inside = finder.trimmed(calls[position:stop])
        if heavy.intersection(inside) and (span := finder.whole(inside)) is not None:
            spans.append(span)
        position = max(stop, position + 1)
    found = {node for span in spans for node in span.members}
    beside = {node for node, reason in finder.reasons.items() if _beside(node, found | heavy)}
    return Spans(size, tuple(spans), finder.outside, {node: finder.reasons[node] for node in beside})


def _beside(node: fx.Node, members: set[fx.Node]) -> bool:
    return node in members or any(other in members for other in (*node.all_input_nodes, *node.users))


def _outside(program: Program, size: int) -> dict[fx.Node, State]:
    """How each value would be cut: those that parameters alone make are whole."""
    states: dict[fx.Node, State] = {}
    shared = set[fx.Node]()
    kinds = {entry.name: entry.kind for entry in program.inputs}
    for node in program.graph.nodes:
        own = node.op == "call_function" and all(operand in shared for operand in node.all_input_nodes)
        if kinds.get(node.name) in _SHARED or (own and not is_random(node)):
            shared.add(node)
        value: Any = node.meta.get("val")
        cut = node not in shared and isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == size
        states[node] = Batched(0) if cut else None
    return states


class _Finder:
    """Walks the operations in order, and ends a stretch where one cannot be part of it."""

    def __init__(self, outside: dict[fx.Node, State], size: int, own: Mapping[fx.Node, int], least: float) -> None:
        self.outside, self.size, self.own, self.least = outside, size, own, least
        self.reasons: dict[fx.Node, str] = {}

    def run(self, calls: Sequence[fx.Node], start: int, stop: int) -> tuple[Span, int]:
        """The stretch from `start` on, and where it ends."""
        states = dict(self.outside)
        rules: dict[fx.Node, Rule] = {}
        early: list[fx.Node] = []
        late: dict[fx.Node, None] = {}
        for position in range(start, stop):
            node = calls[position]
            if node.meta["phase"] is not calls[start].meta["phase"]:
                return Span(tuple(rules), rules, tuple(early), tuple(late)), position
            try:
                self._take(node, states, rules, early, late)
            except NotBatched as reason:
                self.reasons[node] = str(reason)
                return Span(tuple(rules), rules, tuple(early), tuple(late)), position
        return Span(tuple(rules), rules, tuple(early), tuple(late)), stop

    def _take(
        self,
        node: fx.Node,
        states: dict[fx.Node, State],
        rules: dict[fx.Node, Rule],
        early: list[fx.Node],
        late: dict[fx.Node, None],
    ) -> None:
        reads_members = any(operand in rules for operand in node.all_input_nodes)
        if any(operand in late or isinstance(states[operand], Summed) for operand in node.all_input_nodes):
            if is_random(node) or is_effectful(node):
                raise NotBatched(f"{node.target} does more than compute its value")
            late[node] = None
            return
        if node.target is operator.getitem and not reads_members:
            early.append(node)
            return
        if node.target is aten.as_strided.default:
            raise NotBatched("as_strided counts from the beginning of the whole storage")
        rule = gradient_rule(node, states, self.size)
        if rule.state is None:
            heavy = self.own[node] >= self.least and node.target is not FILLED  # parts have their own
            if reads_members or is_random(node) or is_effectful(node) or heavy:
                raise NotBatched(f"{node.target} is computed of the whole batch, or of none of it")
            early.append(node)
            return
        states[node], rules[node] = rule.state, rule

    def trimmed(self, calls: Sequence[fx.Node]) -> Sequence[fx.Node]:
        """A stretch without light operations at its ends, but with items of its results and windows of them."""
        large = [index for index, node in enumerate(calls) if self.own[node] >= self.least]
        stop = end = large[-1] + 1 if large else 0
        while end < len(calls) and not self.own[calls[end]]:
            end += 1
            if calls[end - 1].target is operator.getitem or _is_window(calls[end - 1]):
                stop = end
        return calls[large[0] : stop] if large else []

    def whole(self, calls: Sequence[fx.Node]) -> Span | None:
        """The span of just these operations; None where they cannot stand so."""
        span, end = self.run(calls, 0, len(calls))
        members = set(span.members)
        for node in span.members:
            items = [user for user in node.users if user.target is operator.getitem]
            if isinstance(span.rules[node].state, tuple) and not members.issuperset(items):
                self.reasons[node] = "its results are taken apart elsewhere"
                return None
        return span if end == len(calls) else None


def _is_window(node: fx.Node) -> bool:
    """Whether the node looks at part of a value: there is less to put together behind it than before it."""
    tensors: list[Any] = [n.meta["val"] for n in (node, *node.all_input_nodes)]
    if len(tensors) < 2 or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    return bool(tensors[0].numel() < tensors[1].numel())
