"""What is computed row by row of a matrix with padded columns keeps the padding, in place of cutting it off."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import erase_unused
from memopt.patterns.column_padding import cuts_columns, made_like, pads_columns
from memopt.patterns.rows import RowRegion
from memopt.program import Phase, Program, is_effectful, is_random, is_view

aten = torch.ops.aten
prims = torch.ops.prims

_CASTS = {prims.convert_element_type.default, aten._to_copy.default, aten.alias.default, aten.detach.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_SHAPED = {**dict.fromkeys(_VIEWS, 1), aten.expand.default: 1, aten.full.default: 0}
_CONSTANTS = {aten.scalar_tensor.default: 0, aten.full.default: 1}


class _Tail(enum.Enum):
    """What all padded columns of a value hold."""

    ZERO = 0.0
    LEAST = -math.inf
    FALSE = "false"
    UNKNOWN = "unknown"


# What changes nothing in a reduction of columns.
_NEUTRAL: dict[Any, _Tail] = {aten.sum.dim_IntList: _Tail.ZERO, aten.amax.default: _Tail.LEAST}


def keep_padding(program: Program, region: RowRegion) -> bool:
    """Edit the graph: the values of a region whose product has more columns than they have as many; whether it was.

    A generated kernel makes rows of one length: where logits are cut to the vocabulary and their gradients are padded
    again, the kernels before and after that cannot be one. So the columns that are too many are kept, as what changes
    no sum (zeros) and no maximum (-inf). Where what they hold is not known to be that, they are overwritten before a
    sum, a maximum or a product reads them; everything else reads the leading columns only.

    A row with a gradient that is not finite has no finite gradient before or after.

    Args:
        program: is being edited.
        region: begins with a product; found anew afterwards.
    """
    cuts = [node for node in region.product.users if node in region.wide and cuts_columns(node)]
    if len(cuts) != 1 or len(region.product.users) != 1:
        return False
    widening = _Widening(program, region, cuts[0])
    if not widening.applies():
        return False
    widening.apply()
    return True


class _Widening:
    def __init__(self, program: Program, region: RowRegion, cut: fx.Node) -> None:
        self.program, self.region, self.cut = program, region, cut
        self.columns, self.kept = int(region.product.meta["val"].shape[-1]), int(cut.meta["val"].shape[-1])
        every = [node for phase in Phase for node in region.nodes[phase] if node in region.wide]
        self.old = [node for node in every if node.meta["val"].shape[-1] == self.kept != self.columns]
        self.new: dict[fx.Node, fx.Node] = {}
        self.tails: dict[fx.Node, _Tail] = {}
        self.valid: dict[Phase, fx.Node] = {}  # which columns are not padding

    def applies(self) -> bool:
        """Whether all values can be made with more columns."""
        return bool(self.old) and all(node is self.cut or self._can_be_wider(node) for node in self.old)

    def apply(self) -> None:
        for node in self.old:
            with self.program.graph.inserting_before(node):
                self._widen(node)
        for node in self.old:
            for user in list(node.users):
                if user not in self.new:
                    with self.program.graph.inserting_before(user):
                        self._read(user, node)
        erase_unused(self.program.graph, self.old)

    def _can_be_wider(self, node: fx.Node) -> bool:
        target, value = node.target, node.meta["val"]
        if is_random(node) or is_effectful(node) or not isinstance(value, torch.Tensor) or cuts_columns(node):
            return False
        if target is aten.scatter.value:
            return node.args[1] in (value.ndim - 1, -1) and node.args[0] in self.old
        if target in _VIEWS and node.args[0] not in self.old:
            return False
        pointwise = target in _CASTS or torch.Tag.pointwise in getattr(target, "tags", ())
        return pointwise or (target in _SHAPED and list(node.args[_SHAPED[target]])[-1] in (self.kept, -1))  # type: ignore[arg-type]

    # -- values ---------------------------------------------------------------------------------------------------

    def _widen(self, node: fx.Node) -> None:
        if node is self.cut:
            made, tail = self._filled(node, self.region.product, _Tail.LEAST), _Tail.LEAST
        else:
            args: Any = tuple(node.args)
            if node.target in _SHAPED:
                place = _SHAPED[node.target]
                args = (*args[:place], [*args[place][:-1], self.columns], *args[place + 1 :])
            picks = node.target is aten.scatter.value  # its numbers of columns are no columns
            args, kwargs = fx.map_arg((args, dict(node.kwargs)), lambda item: self._operand(node, item, picks))
            made = self._call(node, node.target, args, kwargs)
            tail = self._tail(node, args)
            if node.target is aten.eq.Tensor and any(self._counts(item) for item in node.args):
                made, tail = self._call(node, aten.bitwise_and.Tensor, (made, self._valid(node))), _Tail.FALSE
        self.new[node], self.tails[made] = made, tail

    def _operand(self, node: fx.Node, operand: fx.Node, picks: bool) -> fx.Node:
        """An operand with as many columns; what has one for each column gets more of them."""
        value = operand.meta["val"]
        if operand in self.new or picks or value.ndim == 0 or value.shape[-1] != self.kept:
            return self.new.get(operand, operand)
        if self._counts(operand):
            shape = [*value.shape[:-1], self.columns]
            return self._call(node, aten.view.default, (self._iota(node), shape))
        made = self._call(node, aten.constant_pad_nd.default, (operand, [0, self.columns - self.kept], 0))
        self.tails[made] = _Tail.ZERO
        return made

    def _counts(self, operand: Any) -> bool:
        """Whether an operand is the numbers of the columns."""
        while isinstance(operand, fx.Node) and is_view(operand) and operand.meta["val"].numel() == self.kept:
            operand = operand.all_input_nodes[0]
        if not isinstance(operand, fx.Node) or operand.target is not prims.iota.default:
            return False
        return bool(operand.args[0] == self.kept and (operand.kwargs["start"], operand.kwargs["step"]) == (0, 1))

    def _tail_of(self, item: Any) -> _Tail:
        if isinstance(item, fx.Node):
            if item.target not in _CONSTANTS or item in self.tails or item.meta["val"].ndim:
                return self.tails.get(item, _Tail.UNKNOWN)
            item = item.args[_CONSTANTS[item.target]]
        if isinstance(item, (int, float)) and item in (0, -math.inf):
            return _Tail.LEAST if item else _Tail.ZERO
        return _Tail.UNKNOWN

    def _tail(self, node: fx.Node, args: Any) -> _Tail:
        """What the padded columns hold, from what those of the operands do."""
        target, found = node.target, _Tail.UNKNOWN
        first, second, third = ([self._tail_of(item) for item in args] + [_Tail.UNKNOWN] * 3)[:3]
        # An operand that is the same for all columns of a row makes padded ones nan only where it does so to others.
        tame = not node.kwargs and all(self._tail_of(item) is _Tail.ZERO or _is_even(item) for item in args[1:])
        if target in _CASTS or target in _VIEWS or target is aten.scatter.value:
            found = first
        elif target is aten.full.default:
            found = second
        elif target is aten.exp.default and first is _Tail.LEAST:
            found = _Tail.ZERO
        elif target is aten.where.self:
            found = third if first is _Tail.FALSE or second is third else _Tail.UNKNOWN
        elif target is aten.mul.Tensor and _Tail.ZERO in (first, second):
            found = _Tail.ZERO if tame or (second is _Tail.ZERO and _is_even(args[0])) else _Tail.UNKNOWN
        elif target is aten.div.Tensor and first is _Tail.ZERO and _is_even(args[1]):
            found = _Tail.ZERO if tame else _Tail.UNKNOWN
        elif target in (aten.add.Tensor, aten.sub.Tensor) and tame:
            both = first is second is _Tail.ZERO
            found = first if both or first is _Tail.LEAST else _Tail.UNKNOWN
        return found

    # -- readers --------------------------------------------------------------------------------------------------

    def _read(self, user: fx.Node, node: fx.Node) -> None:
        """Let a reader that is not as wide itself read the wider value."""
        wide, last = self.new[node], node.meta["val"].ndim - 1
        if pads_columns(user) and user.meta["val"].shape[-1] == self.columns and user.args[2:] in ((), (0,), (0.0,)):
            user.replace_all_uses_with(self._filled(user, wide, _Tail.ZERO))
            self.program.graph.erase_node(user)
            return
        if user.target in _NEUTRAL and _along(user, last):
            user.replace_input_with(node, self._filled(user, wide, _NEUTRAL[user.target]))
        else:
            user.replace_input_with(node, self._call(user, aten.slice.Tensor, (wide, last, 0, self.kept)))

    def _filled(self, at: fx.Node, wide: fx.Node, fill: _Tail) -> fx.Node:
        """The value with what `fill` says in its padded columns."""
        if self.tails.get(wide) is fill:
            return wide
        value = wide.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        made = self._call(at, aten.full.default, ([], fill.value), options)
        return self._call(at, aten.where.self, (self._valid(at), wide, made))

    def _valid(self, at: fx.Node) -> fx.Node:
        phase = at.meta["phase"]
        if phase not in self.valid:
            first = next((node for node in self.old if node.meta["phase"] is phase), at)
            with self.program.graph.inserting_before(first):
                self.valid[phase] = self._call(first, aten.lt.Scalar, (self._iota(first), self.kept))
        return self.valid[phase]

    def _iota(self, like: fx.Node) -> fx.Node:
        options = {"start": 0, "step": 1, "dtype": torch.int64, "requires_grad": False}
        device = self.region.product.meta["val"].device
        return self._call(like, prims.iota.default, (self.columns,), {**options, "device": device})

    def _call(self, like: fx.Node, target: Any, args: Iterable[Any], kwargs: Any = None) -> fx.Node:
        return made_like(self.program, like, target, tuple(args), kwargs)


def _is_even(item: Any) -> bool:
    """Whether an operand is the same for all columns of a row."""
    if not isinstance(item, fx.Node):
        return isinstance(item, (int, float))
    value = item.meta["val"]
    return bool(value.ndim == 0 or value.shape[-1] == 1)


def _along(node: fx.Node, last: int) -> bool:
    """Whether a reduction runs over the last dimension of its operand, and no other."""
    dims = list(node.args[1]) if len(node.args) > 1 and isinstance(node.args[1], (list, tuple)) else []
    return dims in ([last], [-1])
