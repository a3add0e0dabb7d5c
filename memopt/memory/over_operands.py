"""Which results may lie in the memory of an operand: what runs, and what plans count on, go by the same rule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from memopt.patterns.product_sums import ADD_PRODUCT
from memopt.program import tensors_of
from memopt.torch_compat.operators import OpOverload, operator_name, schema_of

_aten = torch.ops.aten
_UNTAGGED = (_aten.hardswish.default, _aten.masked_fill.Tensor)  # element-wise, though torch does not say so
_SUMS = (_aten.addmm.default, ADD_PRODUCT)  # element-wise in the first operand only
_OUT_OVERLOADS = {
    _aten.elu_backward.default: _aten.elu_backward.grad_input,
    _aten.gelu_backward.default: _aten.gelu_backward.grad_input,
    _aten.hardsigmoid_backward.default: _aten.hardsigmoid_backward.grad_input,
    _aten.hardtanh_backward.default: _aten.hardtanh_backward.grad_input,
    _aten.leaky_relu_backward.default: _aten.leaky_relu_backward.grad_input,
    _aten.maximum.default: _aten.maximum.out,
    _aten.minimum.default: _aten.minimum.out,
    _aten.sigmoid_backward.default: _aten.sigmoid_backward.grad_input,
    _aten.silu_backward.default: _aten.silu_backward.grad_input,
    _aten.softplus_backward.default: _aten.softplus_backward.grad_input,
    _aten.tanh_backward.default: _aten.tanh_backward.grad_input,
    _aten.threshold_backward.default: _aten.threshold_backward.grad_input,
}


@functools.cache
def inplace_overload(target: object) -> Callable[..., Any] | None:
    """What computes an operator's result over its first argument, called with the same arguments.

    An in-place overload whose arguments are the same in name, type and order: `aten.relu_.default` for
    `aten.relu.default`; for backward formulas and maximum, which have none, their out= overload (see `WriteOver`). None
    when `target` is not element-wise (nor `addmm`), draws random numbers, or has neither.
    """
    if not isinstance(target, OpOverload) or schema_of(target).is_mutable:
        return None
    if target in _OUT_OVERLOADS:
        return WriteOver(_OUT_OVERLOADS[target])
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    if torch.Tag.pointwise not in target.tags and target not in (*_UNTAGGED, *_SUMS):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), operator_name(target) + "_", None)
    overloads = (getattr(packet, name) for name in packet.overloads()) if packet is not None else ()
    return next((overload for overload in overloads if _is_inplace_form(overload, target)), None)


def _is_inplace_form(overload: OpOverload, target: OpOverload) -> bool:
    ours, theirs = schema_of(target), schema_of(overload)
    if [(a.name, str(a.type)) for a in ours.arguments] != [(a.name, str(a.type)) for a in theirs.arguments]:
        return False
    written = [a.name for a in theirs.arguments if a.alias_info is not None and a.alias_info.is_write]
    return (
        written == [ours.arguments[0].name]
        and [str(r.type) for r in ours.returns] == [str(r.type) for r in theirs.returns] == ["Tensor"]
        and ours.returns[0].alias_info is None
        and theirs.returns[0].alias_info is not None
    )


def may_overwrite(node: fx.Node) -> bool:
    """Whether operator and layouts allow the result to be written over argument 0, if nobody reads that later."""
    if inplace_overload(node.target) is None:
        return False
    operand = node.args[0] if node.args else None
    if not isinstance(operand, fx.Node):
        return False
    result, given = node.meta["val"], operand.meta["val"]
    if not isinstance(result, torch.Tensor) or not isinstance(given, torch.Tensor) or result.numel() == 0:
        return False
    if given.layout is not torch.strided or result.layout is not torch.strided:
        return False
    if (result.shape, result.dtype, result.device) != (given.shape, given.dtype, given.device):
        return False
    if result.stride() != given.stride() or given.is_conj() or given.is_neg():
        return False
    # A new result is dense, so the operand with the same strides is; overlap needs no check of its own.
    return given.untyped_storage().nbytes() == given.numel() * given.element_size()


@dataclasses.dataclass(frozen=True)
class WriteOver:
    """An operator that is given its first argument as its out= argument too."""

    overload: OpOverload

    def __call__(self, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the result, which is `first` overwritten."""
        out = next(argument.name for argument in schema_of(self.overload).arguments if argument.is_out)
        return self.overload(first, *args, **kwargs, **{out: first})

    def __str__(self) -> str:
        return f"{self.overload}_over_first"


def read_otherwise(node: fx.Node, storages: Callable[[fx.Node], Iterable[int]], storage: int) -> str | None:
    """Why a node's result may not be written over argument 0, which lies in this storage, as the node reads it.

    Args:
        node: one that `may_overwrite` allows.
        storages: those of an operand's tensors, in order.
        storage: of argument 0.

    Returns:
        The reason in words; None where each index of the storage is read for that index of the result alone.
    """
    operand: Any = node.args[0]
    geometry = _geometry(tensors_of(operand)[0])
    for other in node.all_input_nodes:
        tensors, held = tensors_of(other), tuple(storages(other))
        if len(tensors) != len(held) and storage in held:  # computed where it is read, from what has these storages
            return f"it reads the memory of {operand.name} once more, through {other.name}"
        for tensor in (tensor for tensor, index in zip(tensors, held, strict=False) if index == storage):
            if node.target in _SUMS and other in node.args[1:]:
                return f"it multiplies the memory of {operand.name} too, through {other.name}"
            if _geometry(tensor) != geometry:
                return f"it reads the memory of {operand.name} in another order too, through {other.name}"
    return None


def may_lie_in(node: fx.Node, storages: Callable[[fx.Node], Sequence[int]]) -> list[fx.Node]:
    """The operands whose memory the node's result may be written to, if nobody reads that later.

    A kernel that is generated writes over any operand of its size; an operator that is called over argument 0 alone.

    Args:
        node: with one result.
        storages: as of `read_otherwise`.
    """
    if node.meta.get("kernel"):
        return node.all_input_nodes
    if not may_overwrite(node):
        return []
    operand: Any = node.args[0]
    held = storages(operand)
    return [operand] if len(held) == 1 and read_otherwise(node, storages, held[0]) is None else []


def _geometry(tensor: torch.Tensor) -> tuple[object, ...]:
    bits = tensor.is_conj(), tensor.is_neg()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, bits
