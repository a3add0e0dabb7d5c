"""A captured graph's outputs beside the model's on fake tensors: what they are, not their values.

Dynamo runs the model's own code on fake tensors as it traces, so what the model returns is known of each graph without
another run. It is compared once, when what was compiled of the graph has run for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from memopt.capture.dynamo_graph import value_of
from memopt.capture.facts import Facts, facts_of, other_fact, other_sharing, shared_memory
from memopt.program import source_line
from memopt.torch_compat.dispatch import is_wrapper
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.not_returned import NotReturned


class MetadataError(RuntimeError):
    """What a graph returns is something else than what the model returns, whatever the values."""


class Expected:
    """What a graph of Dynamo's is to return."""

    def __init__(self, graph_module: fx.GraphModule, *, strides: bool = True) -> None:
        """Read it off the graph, before anything is changed in it.

        Args:
            graph_module: Dynamo's graph.
            strides: whether strides are compared.
        """
        self._strides = strides
        nodes: list[Any] = list(graph_module.graph.output_node().args[0])  # type: ignore[arg-type]
        self._lines = [source_line(node) if isinstance(node, fx.Node) else "" for node in nodes]
        values = [value_of(node) if isinstance(node, fx.Node) else None for node in nodes]
        self._facts = {_name(index): facts_of(value) for index, value in enumerate(values) if _is_plain(value)}
        given = [value_of(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._shared = _shared(values, given)
        # Of tensors with symbolic sizes it is not known where they end.
        self._fixed = {_name(index) for index, value in enumerate(values) if _is_fixed(value)}
        self._fixed |= {f"input {index}" for index, value in enumerate(given) if _is_fixed(value)}

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose first results are compared.

        Raises:
            MetadataError: when it is called; they are others than the model's.
        """
        left: list[Expected] = [self]

        def compared(*args: Any) -> Any:
            returned = run(*args)
            if left and not any(isinstance(value, FakeTensor) for value in returned):
                left.pop()._compare(returned, args)
            return returned

        return compared

    def _compare(self, returned: Sequence[Any], args: Sequence[Any]) -> None:
        found = {_name(index): facts_of(value) for index, value in enumerate(returned) if _is_plain(value)}
        for index, line in enumerate(self._lines):
            name = _name(index)
            if name not in self._facts or name not in found:
                continue
            known = self._facts[name]
            known = known if self._strides else known._replace(strides=found[name].strides)
            if torch.is_inference_mode_enabled():  # a fake view of a tensor with gradients has them, a real one has not
                known = known._replace(requires_gradient=found[name].requires_gradient)
            _refuse(_other(name, known, found[name]), line)
        if len(returned) != len(self._lines):
            _refuse(f"it returns {len(returned)} values, and {len(self._lines)} in the model", "")
        shared = frozenset(pair for pair in _shared(returned, args) if self._fixed.issuperset(pair))
        dropped = {_name(index) for index, value in enumerate(returned) if isinstance(value, NotReturned)}
        known_shared = frozenset(pair for pair in self._shared if dropped.isdisjoint(pair))
        _refuse(other_sharing(known_shared, shared), "")


def _other(name: str, expected: Facts, found: Facts) -> str | None:
    if any(not isinstance(size, int) for size in (*expected.shape, *expected.strides)):
        expected = expected._replace(shape=found.shape, strides=found.strides)
    return other_fact(name, expected, found)


def _refuse(difference: str | None, line: str) -> None:
    if difference is not None:
        where = f" ({line})" if line else ""
        raise MetadataError(f"what was captured is not the model: {difference}{where} (verify=False leaves it so)")


def _shared(returned: Sequence[Any], given: Sequence[Any]) -> frozenset[tuple[str, str]]:
    """Pairs of outputs, and of an output and an input, that overlap in memory."""
    tensors: dict[str, torch.Tensor] = {_name(i): value for i, value in enumerate(returned) if _is_fixed(value)}
    pairs = shared_memory({**tensors, **{f"input {i}": value for i, value in enumerate(given) if _is_fixed(value)}})
    return frozenset(pair for pair in pairs if pair[0] in tensors)


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not is_wrapper(value) and not isinstance(value, NotReturned)


def _is_fixed(value: Any) -> TypeGuard[torch.Tensor]:
    return _is_plain(value) and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _name(index: int) -> str:
    return f"output {index}"
