"""What an `autograd.Function` returns after it was written to in place keeps its gradient.

Dynamo has the forward that it traced return every value in it, for what is kept aside. Torch 2.11 has it return so the
result of a call in place as well, which is the tensor that was written to: of a tensor that is returned twice autograd
keeps the last place alone, whose gradient Dynamo's backward ignores. All gradients of the function's inputs were 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.autograd_function import AutogradFunctionApply

from memopt.torch_compat.patched import replaced

_CALL = "__call__"


def outputs_keep_gradients() -> contextlib.AbstractContextManager[None]:
    """Within: what Dynamo returns for itself is never the tensor that the function returns.

    Tried on torch 2.11 and 2.13, whose Dynamo does not return it; nothing changes there.
    """
    return replaced(AutogradFunctionApply, _CALL, _call)


def keep_gradients_of_outputs() -> None:
    """What `outputs_keep_gradients` does, for good."""
    setattr(AutogradFunctionApply, _CALL, _call)


_plain: Any = AutogradFunctionApply.__call__


def _call(self: Any, fwd: Any, bwd: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(fwd, fx.GraphModule) or not isinstance(bwd, fx.GraphModule):
        return _plain(self, fwd, bwd, *args, **kwargs)
    return _plain(self, _told_apart(fwd, bwd), bwd, *args, **kwargs)


def _told_apart(fwd: fx.GraphModule, bwd: fx.GraphModule) -> fx.GraphModule:
    """The forward, whose values that are returned for Dynamo alone are tensors of their own."""
    graph = fx.Graph()
    made, saved = graph.graph_copy(fwd.graph, {})  # type: ignore[misc]
    if not isinstance(made, (tuple, list)):
        return fwd
    gradients = bwd.graph.find_nodes(op="placeholder")
    ignored = [index for index, (_, gradient) in enumerate(zip(made, gradients, strict=False)) if not gradient.users]
    extra = [index for index in ignored if made[index] not in made[:index]]
    if not extra:
        return fwd
    graph.output((graph.call_function(_apart, (tuple(made), extra)), saved))
    return fx.GraphModule(fwd, graph)


def _apart(made: Sequence[Any], extra: Sequence[int]) -> tuple[Any, ...]:
    own = {id(each) for index, each in enumerate(made) if index not in extra}
    return tuple(
        each.detach() if index in extra and isinstance(each, torch.Tensor) and id(each) in own else each
        for index, each in enumerate(made)
    )
