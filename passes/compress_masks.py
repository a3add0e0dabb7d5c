"""CompressMasks: masks that backward reads are saved as bits, eight to a byte."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import fx

from memopt.graph.rewrite import erase_unused, returned_storages, storages
from memopt.pass_manager import Change, Pass, PassResult, Refusal
from memopt.program import InputKind, Phase, Program, is_random

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
# Smaller masks are not worth the operations.
_LEAST_ELEMENTS = 1024


class CompressMasks(Pass):
    """Save the masks of dropout and of rectifiers as bits.

    Algebra: a truth value is one bit. Element i of a mask becomes bit i % 8 of byte i // 8, so that what becomes one
    byte is read at once; backward takes the bits apart just before it reads the mask.

    Cases:
        1. A mask that was drawn: the second result of `native_dropout`, or a comparison with random numbers, as
           Inductor spells dropout. One byte an element becomes one bit.
        2. The result of a rectifier that backward compares with its threshold only (`threshold_backward`, or
           `le(result, threshold)`): forward makes the comparison, and its bits are saved in place of the numbers.

    Numbers: bitwise equal.

    Refusals: a mask whose memory is not dense (an expanded one), or that reaches the caller; on a GPU one that is drawn
    from a seed, as Inductor spells dropout: a plan recomputes it where its memory is needed. Masks below 1,024
    elements, rectified values that backward reads for themselves (they are saved anyway), and programs without a
    backward graph are left alone.
    """

    name: ClassVar[str] = "compress_masks"
    lowers_floor: ClassVar[bool] = True

    def run(self, program: Program) -> PassResult:
        """Return the program with its masks saved as bits; one change per mask."""
        if not program.training:
            return PassResult(program)
        new = program.copy()
        returned = returned_storages(new)
        readers = _backward_readers(new)
        changes: list[Change] = []
        refusals: list[Refusal] = []
        for node in new.calls:
            if node.meta["phase"] is not Phase.FORWARD:
                continue
            found = [user for user in node.users if user.meta.get("phase") is Phase.BACKWARD]
            value = node.meta["val"]
            if not found or not isinstance(value, torch.Tensor) or value.numel() < _LEAST_ELEMENTS:
                continue
            drawn = value.dtype is torch.bool and _is_drawn(node)
            if not drawn and not _is_compared_only(node, found, readers):
                continue
            if storages(node).keys() & returned:
                refusals.append(Refusal(node.name, "its memory reaches the caller, and is kept anyway"))
            elif drawn and _is_soon_drawn(node):
                refusals.append(Refusal(node.name, "to draw it again from its seed takes less time than its bits"))
            elif not _is_dense(value):
                refusals.append(Refusal(node.name, "its memory is not dense"))
            elif drawn:
                changes.append(_save_bits(node, found))
            else:
                changes.append(_save_comparison(node, found))
        return PassResult.of(program, new, changes, refusals)


def _backward_readers(program: Program) -> dict[int, set[fx.Node]]:
    """By storage, the backward operations that read it; of storages that are resident anyway, more than any."""
    readers: dict[int, set[fx.Node]] = {}
    for node in program.calls:
        if node.meta["phase"] is Phase.BACKWARD:
            for operand in node.all_input_nodes:
                for key in storages(operand):
                    readers.setdefault(key, set()).add(node)
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind is not InputKind.TANGENT:
            for key in storages(node):
                readers.setdefault(key, set()).add(node)
    return readers


def _is_drawn(node: fx.Node) -> bool:
    """Whether the mask was drawn: an item of a random operation, or computed from random numbers, casts aside."""
    return any(is_random(source) or _is_uniform(source) for source in _drawn_from(node))


def _drawn_from(node: fx.Node) -> list[fx.Node]:
    """Its operands, casts looked through."""
    found = []
    for source in node.all_input_nodes:
        while source.target in _CASTS:
            (source,) = source.all_input_nodes
        found.append(source)
    return found


def _is_soon_drawn(node: fx.Node) -> bool:
    """Whether a plan does better to recompute the mask: on a GPU, from random numbers that have a seed.

    Drawn in the kernel that reads it, 16.8 million elements took an H100 6 to 25 µs more, and 10 less where they were
    not stored; a kernel that draws and packs them took 30, which is time even for masks that a plan would keep.
    """
    uniform = any(_is_uniform(source) for source in _drawn_from(node))
    return uniform and bool(node.meta["val"].is_cuda)


def _is_uniform(node: fx.Node) -> bool:
    return "inductor_random" in str(node.target)  # a function of its seed, to torch


def _is_compared_only(node: fx.Node, found: list[fx.Node], readers: dict[int, set[fx.Node]]) -> bool:
    """Whether all that backward does with the value's storage is to compare the value with a number."""
    if not node.meta["val"].is_floating_point() or len(storages(node)) != 1:
        return False
    (key,) = storages(node)
    return readers[key] == set(found) and all(_compares(user, node) for user in found)


def _compares(user: fx.Node, node: fx.Node) -> bool:
    if user.target is aten.threshold_backward.default:
        return user.args[1] is node and user.args[0] is not node
    return user.target is aten.le.Scalar and user.args[0] is node


def _is_dense(value: torch.Tensor) -> bool:
    order = _order(value)
    return value.permute(order).is_contiguous()


def _order(value: torch.Tensor) -> list[int]:
    """The dimensions from the largest stride to the smallest."""
    strides = list(value.stride())
    return sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim))


# -- rewrites ---------------------------------------------------------------------------------------------------------


def _save_bits(mask: fx.Node, found: list[fx.Node]) -> Change:
    packed = _pack(mask, mask, mask.next)
    for user in found:
        user.replace_input_with(mask, _unpack(mask, packed, user))
    return Change(f"{mask.name} saved as bits", (mask.name,), (packed.name,))


def _save_comparison(value: fx.Node, found: list[fx.Node]) -> Change:
    before = (value.name, *(user.name for user in found))
    after: list[str] = []
    packed: dict[Any, fx.Node] = {}
    for user in found:
        threshold = user.args[2] if user.target is aten.threshold_backward.default else user.args[1]
        if threshold not in packed:
            where = value.next
            below = _call(where, value, aten.le.Scalar, value, threshold)
            below.meta["val"] = torch.empty_like(value.meta["val"], dtype=torch.bool)
            packed[threshold] = _pack(value, below, where)
        mask = result = _unpack(value, packed[threshold], user)
        if user.target is aten.threshold_backward.default:
            gradient: Any = user.args[0]
            like = gradient.meta["val"]
            zero = _call(user, user, aten.full.default, [], 0.0, dtype=like.dtype, device=like.device)
            result = _call(user, user, aten.where.self, mask, zero, gradient)
        user.replace_all_uses_with(result)
        erase_unused(value.graph, [user])
        after.append(result.name)
    return Change(f"{value.name} saved as one bit an element", before, tuple(after))


def _call(before: fx.Node, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call before a node, with the source line and in the phase of `like`."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)
    node.meta = {key: value for key, value in like.meta.items() if key in ("stack_trace", "phase")}
    return node


def _weights(before: fx.Node, like: fx.Node, device: torch.device) -> fx.Node:
    """1, 2, 4 … 128, side by side."""
    powers = _call(
        before, like, prims.iota.default, 8, start=0, step=1, dtype=torch.uint8, device=device, requires_grad=False
    )
    one = _call(before, like, aten.full.default, [8], 1, dtype=torch.uint8, device=device)
    return _call(before, like, aten.bitwise_left_shift.Tensor, one, powers)


def _pack(like: fx.Node, mask: fx.Node, before: fx.Node) -> fx.Node:
    """The mask as bytes of eight bits, [elements / 8] rounded up."""
    value = mask.meta["val"]
    elements, order = value.numel(), _order(value)
    flat = mask if order == sorted(order) else _call(before, like, aten.permute.default, mask, order)
    flat = _call(before, like, aten.view.default, flat, [elements])
    if elements % 8:
        flat = _call(before, like, aten.constant_pad_nd.default, flat, [0, 8 - elements % 8], False)
    rows = _call(before, like, aten.view.default, flat, [math.ceil(elements / 8), 8])
    placed = _call(before, like, aten.mul.Tensor, rows, _weights(before, like, value.device))
    return _call(before, like, aten.sum.dim_IntList, placed, [1], dtype=torch.uint8)


def _unpack(like: fx.Node, packed: fx.Node, before: fx.Node) -> fx.Node:
    """The mask from its bits, in the shape and strides of `like`."""
    value = like.meta["val"]
    elements, order = value.numel(), _order(value)
    column = _call(before, before, aten.view.default, packed, [math.ceil(elements / 8), 1])
    bits = _call(before, before, aten.bitwise_and.Tensor, column, _weights(before, before, value.device))
    mask = _call(before, before, aten.ne.Scalar, bits, 0)
    mask = _call(before, before, aten.view.default, mask, [8 * math.ceil(elements / 8)])
    if elements % 8:
        mask = _call(before, before, aten.slice.Tensor, mask, 0, 0, elements)
    mask = _call(before, before, aten.view.default, mask, [value.shape[dim] for dim in order])
    if order == sorted(order):
        return mask
    return _call(before, before, aten.permute.default, mask, [order.index(dim) for dim in range(value.ndim)])
