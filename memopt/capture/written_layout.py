"""Writes that leave a tensor laid out as it is, where torch's capture would have it laid out anew.

A graph is captured as functions: what an in-place operator writes to becomes the result of the operator that returns a
new tensor, and that has the strides of its own: `y.t().masked_fill_(...)` leaves y transposed. What comes after, views
and outputs, then has other strides than in the model. Such a write is captured as a copy to what it writes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import name_of
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.operators import overload_name, schema_of


def functional_of(func: Any) -> Any:
    """The ATen operator that returns what this one writes to its first operand; None where there is none."""
    schema = schema_of(func)
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    name = schema.name.split("::")[-1]
    if func.namespace != "aten" or not name.endswith("_") or written.count(True) != 1 or not written[0]:
        return None
    packet = getattr(torch.ops.aten, name[:-1], None)
    return getattr(packet, overload_name(func), None)


def other_layout(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether the operator that returns a new tensor lays it out otherwise than what is written to, on fake tensors."""
    functional = None if func is torch.ops.aten.copy_.default else functional_of(func)
    if functional is None or not isinstance(args[0], torch.Tensor) or args[0].is_contiguous():
        return False
    made = functional(*args, **kwargs)
    if not isinstance(made, torch.Tensor) or made.shape != args[0].shape:
        return False
    strides = zip(made.shape, made.stride(), args[0].stride(), strict=True)
    return any(size != 1 and here != there for size, here, there in strides)


def keep_layout(node: fx.Node) -> None:
    """Have a call in a graph of Dynamo's write so that what it writes to stays laid out as it is."""
    target, name = node.target, node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.op == "call_method":
        node.op, target = "call_function", _method(str(name))
    if node.op == "call_function":
        node.target = _kept(target, str(name))


def as_tiles(node: fx.Node) -> None:
    """Have a call of `unfold` in a graph of Dynamo's, whose windows tile the tensor, show them by other views.

    torch writes through those; what it writes through `unfold` is laid out anew, contiguous.
    """
    if name_of(node) == "unfold" and (node.op == "call_method" or node.target is torch.ops.aten.unfold.default):
        node.op, node.target = "call_function", _tiles


def _tiles(source: Any, dimension: int, size: int, step: int) -> Any:
    dimension %= source.dim()
    return source.unflatten(dimension, (-1, size)).movedim(dimension + 1, -1)


_tiles.__name__ = _tiles.__qualname__ = "unfold"  # what is asked of nodes goes by it


def _method(name: str) -> Callable[..., Any]:
    return lambda source, *args, **kwargs: getattr(source, name)(*args, **kwargs)


def _kept(target: Any, name: str) -> Callable[..., Any]:
    def kept(*args: Any, **kwargs: Any) -> Any:
        with _Copies():  # type: ignore[no-untyped-call]
            return target(*args, **kwargs)

    kept.__name__ = kept.__qualname__ = name  # what is asked of nodes goes by it
    return kept


class _Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within, what an operator writes is copied to where it writes it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        functional = None if func is torch.ops.aten.copy_.default else functional_of(func)
        if functional is None or not isinstance(args[0], torch.Tensor) or args[0].is_contiguous():
            return func(*args, **kwargs)
        made = functional(*args, **kwargs)
        return torch.ops.aten.copy_.default(args[0], made) if made.shape == args[0].shape else func(*args, **kwargs)
