"""What a model computes, in its own precision and in float64: the two things that ONNX results are measured by."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memopt.convert.emit import tensors
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import TorchDispatchMode
from memopt.torch_compat.operators import schema_of

log = logging.getLogger(__name__)

# A copy of the weights in float64 is made up to here; above, each is widened where it is used, and freed again.
_COPY_BYTES = 256 * 2**20
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operation in float64, whatever precision its operands or its `dtype` argument have.

    An operation that writes into a narrow tensor is run as it is: a copy would lose what it writes.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._assert_tensor_metadata.default:  # it asserts the narrow type
            return None
        if schema_of(func).is_mutable and any(
            isinstance(value, torch.Tensor) and value.dtype in _NARROW
            for argument, value in (*zip(schema_of(func).arguments, args, strict=False), *_named(func, kwargs))
            if argument.alias_info is not None and argument.alias_info.is_write
        ):
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        return pytree.tree_map(_widened, func(*args, **kwargs))


def run(function: Callable[..., Any], inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that the model returns, in its own precision."""
    with torch.no_grad():
        return tensors(function(**inputs))


def run_wide(function: Callable[..., Any], inputs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    """The same in float64; None where the model's code does not allow it."""
    for attempt in (_copied, _in_place):
        try:
            with torch.no_grad():
                found = attempt(function, inputs)
        except Exception as error:
            log.info("no float64 reference by %s: %s", attempt.__name__.strip("_"), error)
            continue
        if found is not None:
            return found
    return None


def _copied(function: Callable[..., Any], inputs: Mapping[str, Any]) -> list[torch.Tensor] | None:
    if not isinstance(function, torch.nn.Module):
        return None
    if sum(value.nbytes for value in (*function.parameters(), *function.buffers())) > _COPY_BYTES:
        return None
    wide = copy.deepcopy(function).double()
    with Wide():  # type: ignore[no-untyped-call]
        return tensors(wide(**{name: pytree.tree_map(_widened, value) for name, value in inputs.items()}))


def _in_place(function: Callable[..., Any], inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    with Wide():  # type: ignore[no-untyped-call]
        return tensors(function(**inputs))


def _widened(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW:
        return leaf.double()
    return torch.float64 if isinstance(leaf, torch.dtype) and leaf in _NARROW else leaf


def _named(func: Any, kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    return [(argument, kwargs[argument.name]) for argument in schema_of(func).arguments if argument.name in kwargs]
