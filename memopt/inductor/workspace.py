"""What library calls of Inductor's generated code take beyond their results, from the table of measured operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import apart
from memopt.memory.cost.table import CostTable
from memopt.patterns.product_sums import ADD_PRODUCT, ADD_PRODUCT_INTO
from memopt.torch_compat import pytree
from memopt.torch_compat.fake_tensors import FakeTensor, no_fake_mode
from memopt.torch_compat.operators import OpOverload, schema_of

aten = torch.ops.aten

_MAKE_ROOM = frozenset((aten.empty.memory_format, aten.empty_strided.default))


class MeasuredWorkspace:
    """Tells what calls take: at once where that is known, else when it is asked for, for all such calls together."""

    def __init__(self, table: CostTable) -> None:
        """Take what knows, and measures, what operators take."""
        self._table = table
        self._waiting: list[fx.Node] = []

    def __call__(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> int | Callable[[], int]:
        """Bytes that one call takes beyond its results, or what tells them later; its tensors are fake."""
        if target is ADD_PRODUCT_INTO:
            target, result = ADD_PRODUCT, args[0]
        if not isinstance(target, OpOverload) or schema_of(target).is_mutable or target in _MAKE_ROOM:
            return 0
        node = _called(target, args, kwargs, result)
        with no_fake_mode(), torch.no_grad():
            known = self._table.known(node)
        nodes = list(node.graph.nodes)
        if known is not None:
            for item in nodes:
                item.meta.clear()  # nodes are in cycles: the tensors must die when the generated code lets go of them
            return known.workspace_bytes
        for item in nodes:
            item.meta["val"] = pytree.tree_map_only(FakeTensor, apart, item.meta["val"])
        self._waiting.append(node)
        return lambda: self._measured(node)

    def _measured(self, node: fx.Node) -> int:
        with no_fake_mode(), torch.no_grad():
            if self._waiting:
                self._table.learn(self._waiting)
                self._waiting = []
            return self._table.measure(node)


def _called(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> fx.Node:
    """The call as a node, as a captured graph would have it: it may be known from there."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}

    def stand_in(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in nodes:
            nodes[id(value)] = graph.placeholder(f"x{len(nodes)}")
            nodes[id(value)].meta["val"] = value
        return nodes[id(value)]

    given, named = pytree.tree_map(stand_in, _as_captured(target, args, kwargs))
    node = graph.call_function(target, given, named)
    node.meta["val"] = result
    return node


def _as_captured(
    target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, by position where the schema lets them, without the last ones that are as by default."""
    given, named = list(args), dict(kwargs)
    positional = [argument for argument in schema_of(target).arguments if not argument.kwarg_only]
    for argument in positional[len(given) :]:
        if argument.name not in named and not argument.has_default_value():
            break  # the call is not valid: left as it is
        given.append(named.pop(argument.name, argument.default_value))
    usual = {item.name: item.default_value for item in schema_of(target).arguments if item.has_default_value()}
    while given and _is_usual(positional[len(given) - 1].name, given[-1], usual):
        given.pop()
    kept = {name: value for name, value in named.items() if not _is_usual(name, value, usual)}
    return tuple(given), kept


def _is_usual(name: str, value: Any, usual: Mapping[str, Any]) -> bool:
    return name in usual and not isinstance(value, torch.Tensor) and value == usual[name]
