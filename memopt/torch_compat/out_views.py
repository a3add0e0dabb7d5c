"""What operators write through `out=` to a view with gaps: computed by itself and copied into the view, in the graph.

Dynamo ends a graph at such a call (torch 2.11 to 2.13), as functionalization would lose the strides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._dynamo.variables import dicts, lists, tensor
from torch._dynamo.variables import torch as torch_variables

from memopt.common.scoped import Hook


def out_views_copied() -> contextlib.AbstractContextManager[None]:
    """Within: a call with `out=` that eager runs as it is, to a view that is not contiguous, ends no graph.

    What eager would refuse, resize or convert stays as Dynamo has it, and what draws random numbers, as the numbers may
    depend on the strides. Elsewhere, and in other threads, tracing is as ever. Tried on torch 2.13.
    """
    return _hook.within()


@Hook
def _hook() -> None:
    """Look at each call of an operator that Dynamo traces, once in a process."""
    operation: Any = torch_variables.TorchInGraphFunctionVariable
    plain = operation.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if not _hook.in_force or "out" not in kwargs:
            return plain(self, tx, args, kwargs)
        out = kwargs["out"].realize()
        written = list(out.items) if isinstance(out, (lists.TupleVariable, lists.ListVariable)) else [out]
        written = [each.realize() for each in written]
        others = {name: value for name, value in kwargs.items() if name != "out"}
        if not _is_copied(self.value, written, [*args, *others.values()]):
            return plain(self, tx, args, kwargs)
        found = plain(self, tx, args, others)
        made = list(found.items) if isinstance(found, lists.BaseListVariable) else [found]
        if len(made) != len(written) or not all(map(_is_alike, made, written)):
            return plain(self, tx, args, kwargs)  # what was made is used by nothing
        for value, view in zip(made, written, strict=True):
            view.call_method(tx, "copy_", [value], {})
        if isinstance(found, lists.BaseListVariable):
            found.items[:] = written
            return found
        return written[0]

    operation.call_function = call_function


def _is_copied(function: Any, written: Sequence[Any], given: Sequence[Any]) -> bool:
    """Whether eager writes just what the function returns, some of it to where it is not contiguous."""
    views = [_value(each) for each in written]
    if not all(isinstance(view, torch.Tensor) and view.layout is torch.strided for view in views):
        return False
    if all(view.is_contiguous() for view in views) or isinstance(function, torch._ops.OpOverload):
        return False
    inputs = [value for each in given for value in _tensors(each)]
    if not inputs or _draws(function):
        return False
    if torch.is_grad_enabled() and any(each.requires_grad for each in (*inputs, *views)):
        return False
    places = [view.untyped_storage()._cdata for view in views]
    if len(set(places)) < len(places) or any(each.untyped_storage()._cdata in places for each in inputs):
        return False
    steps = (pair for view in views for pair in zip(view.shape, view.stride(), strict=True))
    return all(stride or size <= 1 for size, stride in steps)


def _draws(function: Any) -> bool:
    packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    overloads = [getattr(packet, name) for name in packet.overloads()] if packet is not None else []
    return any(torch.Tag.nondeterministic_seeded in each.tags for each in overloads)


def _is_alike(made: Any, view: Any) -> bool:
    one, other = _value(made), _value(view)
    return one is not None and (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def _value(variable: Any) -> Any:
    """The fake tensor of a tensor; None of anything else."""
    if not isinstance(variable, tensor.TensorVariable):
        return None
    return variable.as_proxy().node.meta.get("example_value")


def _tensors(variable: Any) -> Iterator[torch.Tensor]:
    """Those of an argument, which may be a list or a dictionary."""
    variable = variable.realize()
    value = _value(variable)
    if value is not None:
        yield value
    if isinstance(variable, lists.BaseListVariable):
        for each in variable.items:
            yield from _tensors(each)
    elif isinstance(variable, dicts.ConstDictVariable):
        for each in variable.items.values():
            yield from _tensors(each)
