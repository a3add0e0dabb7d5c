"""What a step on fake tensors takes, with the memory that its operators need while they run."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.memory.cost.table import CostTable
from memopt.memory.hidden import WholeLedger
from memopt.torch_compat import pytree
from memopt.torch_compat.fake_tensors import FakeTensorMode
from memopt.torch_compat.operators import OpOverload

_RECURRENT = re.compile(r"rnn|memopt\.recurrent")


class StepLedger(WholeLedger):  # type: ignore[no-untyped-call]
    """A ledger that remembers what was alive when each operator ran: what they need meanwhile is asked in the end."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is counted yet, of storages of this device alone."""
        super().__init__(device)
        self._calls: dict[Any, tuple[int, Any]] = {}  # by operator and operands: the most bytes alive, and what it was

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, enter the storages of its results, and remember it."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # A recurrent layer's workspace is among what the ledger counts itself.
        if self.counting and isinstance(func, OpOverload) and not _is_recurrent(func):
            call = func, args, dict(kwargs or {}), result
            key = _key(call, {})
            known = self._calls.get(key)
            if known is None or known[0] < self.live:
                self._calls[key] = self.live, _described(call) if known is None else known[1]
        return result

    def part(self) -> Part:
        """What was seen so far; from now on what is alive is the beginning."""
        found = Part(self.peak, list(self._calls.values()))
        self.peak, self._calls = self.live, {}
        return found


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        peak: the most bytes of tensors that were alive at once.
        calls: of operators: the bytes alive after each, and what it was.
    """

    peak: int
    calls: Sequence[tuple[int, Any]]

    def with_scratch(self, table: CostTable | None) -> int:
        """The most bytes alive at once, with what operators take while they run; those not known are run for it."""
        if table is None:
            return self.peak
        with FakeTensorMode():
            nodes = [_node(call) for _, call in self.calls]
        scratch = table.workspaces(nodes)
        return max([self.peak, *(live + size for (live, _), size in zip(self.calls, scratch, strict=True))])


@dataclasses.dataclass(frozen=True)
class _Layout:
    """A tensor without its memory; the number tells those of one call apart."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@functools.cache
def _is_recurrent(func: OpOverload) -> bool:
    return _RECURRENT.search(str(func)) is not None


def _key(value: Any, seen: dict[int, int]) -> Any:
    """What calls have in common that `_described` describes alike: most of a step's are the same call again."""
    if isinstance(value, torch.Tensor):
        layout = tuple(value.shape), tuple(value.stride()) if value.layout is torch.strided else ()
        return seen.setdefault(id(value), len(seen)), repr(layout), value.dtype, value.device
    if type(value) in (tuple, list):
        return type(value), *[_key(item, seen) for item in value]
    if type(value) is dict:
        return dict, *[(name, _key(item, seen)) for name, item in value.items()]
    return type(value), repr(value)


def _described(call: Any) -> Any:
    """A call with layouts in place of its tensors."""
    seen: dict[int, int] = {}

    def describe(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        strides = tuple(leaf.stride()) if leaf.layout is torch.strided else ()
        number = seen.setdefault(id(leaf), len(seen))
        return _Layout(number, tuple(leaf.shape), strides, leaf.dtype, leaf.device)

    return pytree.tree_map(describe, call)


def _node(call: Any) -> fx.Node:
    """The call as a node of a graph of its own, whose values are fake."""
    func, args, kwargs, result = call
    graph, made = fx.Graph(), dict[int, fx.Node]()

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, _Layout):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.strides or leaf.shape, dtype=leaf.dtype, device=leaf.device)

    def operand(leaf: Any) -> Any:
        if not isinstance(leaf, _Layout):
            return leaf
        if leaf.number not in made:
            made[leaf.number] = graph.placeholder(f"operand_{leaf.number}")
            made[leaf.number].meta["val"] = fake(leaf)
        return made[leaf.number]

    args, kwargs = pytree.tree_map(operand, (tuple(args), kwargs))
    node = graph.call_function(func, args, kwargs)
    node.meta["val"] = pytree.tree_map(fake, result)
    return node
