"""Operators that torch writes out in Python before autograd sees them, though it has kernels and gradients for them.

Interpolation and margin losses are among them. Written out, a bilinear upsampling is four lookups and their weighted
sums, each a tensor: several times what eager's kernel takes, forward and backward, and rounded otherwise. Code that
fuses the pieces does not mind; what runs a graph operator by operator does.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table

from memopt.torch_compat.operators import OpOverload
from memopt.torch_compat.patched import replaced

_WRITTEN_OUT = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


@contextlib.contextmanager
def whole_operators(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Within: AOTAutograd traces such operators as eager calls them; tried on torch 2.13.

    Args:
        example_inputs: of the graph; where one has a size that is a symbol, all is as ever, as the kernels ask for
            numbers.
    """
    if any(map(_symbolic, example_inputs)):
        yield
        return
    with contextlib.ExitStack() as stack:
        for operator in _operators():
            kept = {key: kernel for key, kernel in operator.py_kernels.items() if key not in _WRITTEN_OUT}
            stack.enter_context(replaced(operator, "py_kernels", kept))
        _forget_kernels()
        try:
            yield
        finally:
            stack.close()
            _forget_kernels()


@functools.cache
def _operators() -> tuple[Any, ...]:
    """Those that eager has one kernel for, and the overloads that call nothing but these."""
    found = list[Any]()
    for packet in {each.overloadpacket for each in decomposition_table if isinstance(each, OpOverload)}:
        overloads = [getattr(packet, each) for each in packet.overloads()]
        written = [each for each in overloads if _is_written_out(each)]
        found += written if written and any(map(_has_kernel, overloads)) else []
    return tuple(found)


def _is_written_out(operator: Any) -> bool:
    # A batch norm writes to buffers that its schema does not say: only written out it is right in a graph.
    return torch._C.DispatchKey.Autograd in operator.py_kernels and "batch_norm" not in operator.name()


def _has_kernel(operator: Any) -> bool:
    name = operator.name()
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    return not composite and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


def _forget_kernels() -> None:
    """Have the dispatcher look anew for which kernel an operator has."""
    for operator in _operators():
        operator._dispatch_cache.clear()


def _symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat))
