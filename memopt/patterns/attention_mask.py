"""The mask that the fused operators take for what an attention does to its scores: added, replaced, scaled, causal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from memopt.graph.rewrite import Refused
from memopt.patterns.attention import Added, Attention, Hidden, Scaled
from memopt.patterns.elements import shape
from memopt.patterns.mask_values import bounds_of_values, known_value
from memopt.program import Program

aten = torch.ops.aten

# Added to any score that a model computes, a number as low as this swallows the score.
_ABSORBING = -1e30
# A number as low as this hides a score from a row that has another one.
_HIDING = -9.9e8  # -1e9 in bfloat16 is a little more
# Beside a number this low, float16 keeps nothing of a score but whole units.
_LOST_IN_HALF = -1024.0


@dataclasses.dataclass(frozen=True)
class Mask:
    """What stands for the steps between the scores and the softmax of an attention.

    Attributes:
        node: what is added to the scores; None: nothing.
        causal: whether each query sees the keys up to its own place only.
        scale: what the scores are multiplied with.
        read: names of the inputs whose values were read to know it.
    """

    node: fx.Node | None
    causal: bool
    scale: float
    read: frozenset[str]


class Masks:
    """Makes masks in a program, each once for all attentions that share it."""

    def __init__(
        self,
        program: Program,
        call: Callable[..., fx.Node],
        viewed: Callable[[fx.Node, tuple[int, ...], fx.Node], fx.Node | None],
    ) -> None:
        """Take the program, and how a call (before a node, of a target, with arguments) and a view are put into it."""
        self.program = program
        self._call, self._viewed = call, viewed
        self._masks: dict[Any, Mask] = {}

    def of(self, found: Attention) -> Mask:
        """The mask of an attention, the same nodes for equal ones.

        Raises:
            Refused: what happens to its scores is no mask that the fused operators take, or they would treat rows that
                are hidden wholly in another way.
        """
        key = (found.steps, found.lead, found.lengths[:2], found.dtype)
        if key not in self._masks:
            self._masks[key] = self._build(found)
        return self._masks[key]

    def _build(self, found: Attention) -> Mask:
        scale, mask, open_rows = 1.0, None, False
        for step in found.steps:
            if isinstance(step, Scaled):
                scale *= step.by
                mask = mask and self._call(found.second, aten.mul.Tensor, (mask, step.by))
            elif isinstance(step, Added):
                mask = self._added(found, mask, step)
            else:
                number, needs_open_rows = _fill(step.number, found.dtype)
                open_rows = open_rows or needs_open_rows
                mask = self._hidden(found, mask, step, number)
        if mask is None:
            return Mask(None, False, scale, frozenset())
        dtype = mask.meta["val"].dtype
        if dtype != found.dtype and (dtype is not torch.float32 or mask.meta["val"].device.type != "cpu"):
            raise Refused(f"its mask is {dtype}, its operands are {found.second.meta['val'].dtype}")
        if mask.meta["val"].stride(-1) != 1 and shape(mask)[-1] != 1:  # CUDA's operators take no other masks
            mask = self._call(found.second, aten.clone.default, (mask,), {"memory_format": torch.contiguous_format})
        return self._judged(found, mask, scale, open_rows)

    def _judged(self, found: Attention, mask: fx.Node, scale: float, open_rows: bool) -> Mask:
        """Drop a mask that does nothing or is causal, and see to rows that are hidden wholly."""
        known = known_value(self.program, mask)
        if known is not None:
            if not known.value.any():
                return Mask(None, False, scale, known.read)
            if _is_causal(known.value, found.lengths[0], found.lengths[1]):
                return Mask(None, True, scale, known.read)
            if bool((known.value > -math.inf).any(-1).all()):
                return Mask(mask, False, scale, known.read)
        if open_rows:
            raise Refused("a row may be hidden wholly: by hand it is the mean of all values, in the fused operator 0")
        bounds = bounds_of_values(self.program, mask)
        if bounds is not None:
            if mask.meta["val"].dtype is torch.float16 and bounds[0][0] < _LOST_IN_HALF:
                raise Refused("a row may be hidden wholly: by hand float16 rounds its scores away, in the operator not")
            if mask.meta["val"].device.type != "cpu" and bounds[0][0] < _ABSORBING:
                # CUDA's kernels multiply by log2(e): the lowest number would overflow, and a hidden row become NaN.
                mask = self._call(found.second, aten.clamp_min.default, (mask, _ABSORBING))
            return Mask(mask, False, scale, bounds[1])
        if mask.meta["val"].device.type != "cpu":
            raise Refused("a row may be hidden wholly: by hand it is NaN, in the fused operator 0")
        lowest = self._call(found.second, aten.amax.default, (mask, [-1], True))
        hidden = self._call(found.second, aten.eq.Scalar, (lowest, -math.inf))
        guarded = self._call(found.second, aten.where.self, (hidden, self._number(found, mask, math.nan), mask))
        return Mask(guarded, False, scale, frozenset())

    def _added(self, found: Attention, mask: fx.Node | None, step: Added) -> fx.Node:
        addend = self._aligned(found, step.addend, step.shape)
        if not addend.meta["val"].is_floating_point():
            raise Refused(f"{step.addend.name}, which is added to its scores, is {addend.meta['val'].dtype}")
        if step.by != 1:
            addend = self._call(found.second, aten.mul.Tensor, (addend, step.by))
        return addend if mask is None else self._call(found.second, aten.add.Tensor, (mask, addend))

    def _hidden(self, found: Attention, mask: fx.Node | None, step: Hidden, number: float) -> fx.Node:
        condition = self._aligned(found, step.condition, step.shape)
        if condition.meta["val"].dtype is not torch.bool:
            raise Refused(f"{step.condition.name}, which hides scores, is {condition.meta['val'].dtype}")
        shown = self._number(found, mask, 0.0) if mask is None else mask
        pair = (self._number(found, mask, number), shown)
        return self._call(found.second, aten.where.self, (condition, *(pair if step.where else pair[::-1])))

    def _number(self, found: Attention, mask: fx.Node | None, number: float) -> fx.Node:
        value = found.second.meta["val"]
        dtype = value.dtype if mask is None else mask.meta["val"].dtype
        kwargs = {"dtype": dtype, "device": value.device}
        return self._call(found.second, aten.scalar_tensor.default, (number,), kwargs)

    def _aligned(self, found: Attention, node: fx.Node, whole: tuple[int, ...]) -> fx.Node:
        """The node, which broadcasts to scores of shape `whole`, as a tensor that broadcasts to batch x heads x ..."""
        sizes = (1,) * (len(whole) - len(shape(node))) + shape(node)
        lead, scores = sizes[:-2], whole[:-2]
        if all(size == 1 for size in lead):
            lead = (1, 1)
        elif lead == scores:
            lead = found.lead
        elif len(scores) > 2 and found.lead[1] == scores[-1] and all(size == 1 for size in lead[:-1]):
            lead = (1, lead[-1])
        elif len(scores) > 2 and found.lead[1] == scores[-1] and lead[:-1] == scores[:-1]:
            lead = (found.lead[0], lead[-1])
        elif scores != found.lead:
            raise Refused(f"{node.name} broadcasts to the scores in a way that the fused operator cannot")
        viewed = self._viewed(node, (*lead, *sizes[-2:]), found.second)
        if viewed is None:
            raise Refused(f"{node.name} has no view as a mask of four dimensions")
        return viewed


def _fill(number: float, dtype: torch.dtype) -> tuple[float, bool]:
    """The number of a mask that hides what `number` hides, and whether that is so only in rows that show something."""
    if number == -math.inf:
        return number, False
    lowest = max(number, torch.finfo(dtype).min)
    if lowest <= _ABSORBING:
        return lowest, False
    if number <= _HIDING or number == torch.finfo(torch.float16).min:
        return -math.inf, True
    raise Refused(f"scores are replaced by {number:g}, which does not hide them for certain")


def _is_causal(mask: torch.Tensor, queries: int, keys: int) -> bool:
    if queries != keys or mask.shape[-2:] != (queries, keys):
        return False
    shown = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril_()
    return bool(torch.where(shown, mask == 0, mask <= _HIDING).all())
