"""What is known of a mask before a call: its values where the program owns them, else bounds of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import fx

from memopt.program import InputKind, Program, is_effectful, is_random
from memopt.torch_compat.fake_tensors import FakeTensor, no_fake_mode

aten = torch.ops.aten

LARGEST = 2**24
"""Elements of the largest tensor that is computed to learn a mask's values."""

Bounds = tuple[float, float]

_SAME = frozenset({
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.expand.default,
    aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.clone.default, aten.alias.default,
    aten.detach.default, aten.index.Tensor, aten.index_select.default, aten.gather.default, aten.embedding.default,
    aten.repeat.default, aten.lift_fresh_copy.default,
})  # fmt: skip
"""Operators whose results hold nothing but elements of the first operand."""

_WITH_ZERO = frozenset({aten.tril.default, aten.triu.default, aten.constant_pad_nd.default})


@dataclasses.dataclass(frozen=True)
class Known:
    """The values of a node that are the same in every call, and the parameters and buffers they were read from."""

    value: torch.Tensor
    read: frozenset[str]


def known_value(program: Program, node: fx.Node) -> Known | None:
    """The node's values when nothing but the program's own constants, parameters and buffers make them.

    None when the caller's inputs or random numbers take part, a mutated buffer does, or a tensor of more than `LARGEST`
    elements would have to be computed.
    """
    nodes = _owned(program, node)
    if nodes is None:
        return None
    last = {argument: current for current in nodes for argument in current.all_input_nodes}
    values: dict[fx.Node, Any] = {}
    with no_fake_mode(), torch.no_grad():
        for current in nodes:
            if current.op == "placeholder":
                values[current] = program.state[current.name]
                continue
            args, kwargs = fx.map_arg((current.args, current.kwargs), lambda n: values[n])
            values[current] = current.target(*args, **kwargs)  # type: ignore[operator]
            for argument in current.all_input_nodes:
                if last[argument] is current:
                    del values[argument]
    sources = [entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
    read = {entry.name for entry in sources} & {current.name for current in nodes}
    return Known(values[node], frozenset(read))


def _owned(program: Program, node: fx.Node) -> list[fx.Node] | None:
    """The nodes that a node is computed from, itself included, in order; None when they cannot be computed now."""
    mutated = {output.target for output in program.outputs if output.target is not None}
    nodes: set[fx.Node] = set()
    work = [node]
    while work:
        current = work.pop()
        if current in nodes:
            continue
        nodes.add(current)
        value = current.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() > LARGEST:
            return None
        if value.device.type == "cuda" and not torch.cuda.is_available():
            return None
        if current.op == "placeholder":
            if current.name in mutated or not _is_real(program.state.get(current.name)):
                return None
        elif current.op != "call_function" or is_random(current) or is_effectful(current):
            return None
        work.extend(current.all_input_nodes)
    return [current for current in node.graph.nodes if current in nodes]


def _is_real(value: torch.Tensor | None) -> bool:
    return value is not None and not isinstance(value, FakeTensor) and not value.is_meta


def bounds_of_values(program: Program, node: Any) -> tuple[Bounds, frozenset[str]] | None:
    """Finite numbers between which all of a node's values lie, and the parameters and buffers that were read for it.

    None when no such bounds are known: the values may be infinite or NaN.
    """
    reader = _Reader(program)
    found = reader.bounds(node)
    return None if found is None else (found, frozenset(reader.read))


class _Reader:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.read: set[str] = set()
        self._seen: dict[fx.Node, Bounds | None] = {}

    def bounds(self, node: Any) -> Bounds | None:
        if isinstance(node, (bool, int, float)):
            return (float(node), float(node)) if math.isfinite(node) else None
        if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
            return None
        if node not in self._seen:
            self._seen[node] = None
            self._seen[node] = self._within(node, self._of(node))
        return self._seen[node]

    @staticmethod
    def _within(node: fx.Node, found: Bounds | None) -> Bounds | None:
        """The bounds as the node's dtype can hold them; None when a value could round to infinity."""
        dtype = node.meta["val"].dtype
        if dtype is torch.bool:
            return (0.0, 1.0)
        if not dtype.is_floating_point:
            limits = torch.iinfo(dtype)
            whole = (float(limits.min), float(limits.max))
            return whole if found is None or found[0] < whole[0] or found[1] > whole[1] else found
        if found is None:
            return None
        largest = torch.finfo(dtype).max
        return found if -largest <= found[0] and found[1] <= largest else None

    def _of(self, node: fx.Node) -> Bounds | None:
        if node.op == "placeholder":
            return self._of_state(node)
        if node.op != "call_function":
            return None
        target, args = node.target, node.args
        if target in _SAME:
            return self.bounds(args[0])
        if target in (aten.zeros.default, aten.zeros_like.default):
            return (0.0, 0.0)
        if target in (aten.ones.default, aten.ones_like.default):
            return (1.0, 1.0)
        if target in (aten.full.default, aten.full_like.default):
            return self.bounds(args[1])
        if target in (aten.scalar_tensor.default, aten._to_copy.default):
            return self.bounds(args[0])
        if target in _WITH_ZERO:
            return _union(self.bounds(args[0]), (0.0, 0.0)) if len(args) < 3 else None
        if target is aten.where.self:
            return _union(self.bounds(args[1]), self.bounds(args[2]))
        if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            return _union(self.bounds(args[0]), self.bounds(args[2]))
        return self._of_arithmetic(node)

    def _of_arithmetic(self, node: fx.Node) -> Bounds | None:
        target, args = node.target, node.args
        if target is aten.neg.default:
            return _times(self.bounds(args[0]), (-1.0, -1.0))
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            return _times(self.bounds(args[0]), self.bounds(args[1]))
        if target in (aten.add.Tensor, aten.add.Scalar):
            return _plus(self.bounds(args[0]), self.bounds(args[1]), float(node.kwargs.get("alpha", 1)))  # type: ignore[arg-type]
        if target in (aten.sub.Tensor, aten.sub.Scalar):
            return _plus(self.bounds(args[0]), self.bounds(args[1]), -float(node.kwargs.get("alpha", 1)))  # type: ignore[arg-type]
        if target is aten.rsub.Scalar and len(args) == 2:
            return _plus(self.bounds(args[1]), self.bounds(args[0]), -1.0)
        return None

    def _of_state(self, node: fx.Node) -> Bounds | None:
        value = self.program.state.get(node.name)
        mutated = any(output.target == node.name for output in self.program.outputs)
        if value is None or mutated or not _is_real(value) or not value.is_floating_point() or not value.numel():
            return None
        with no_fake_mode(), torch.no_grad():
            low, high = (float(limit) for limit in torch.aminmax(value.detach()))
        if not math.isfinite(low) or not math.isfinite(high):
            return None
        if self.program.input_of(node.name).kind is not InputKind.CONSTANT:
            self.read.add(node.name)
        return low, high


def _union(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))


def _plus(a: Bounds | None, b: Bounds | None, factor: float) -> Bounds | None:
    if a is None or b is None:
        return None
    ends = (b[0] * factor, b[1] * factor)
    return a[0] + min(ends), a[1] + max(ends)


def _times(a: Bounds | None, b: Bounds | None) -> Bounds | None:
    if a is None or b is None:
        return None
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)
