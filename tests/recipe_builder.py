"""A random recipe in the making: steps are drawn, run as eager PyTorch does, and kept if others may build on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.instructions import INPLACE, Step, apply_step, leaf_value

MAX_NUMEL, MAX_ABS = 512, 30.0


class Builder:
    """The recipe so far, and the values that eager PyTorch gives it.

    Attributes:
        draw: hypothesis's draw.
        training: parameters require gradients, and steps that autograd refuses are left out.
        random: steps may draw random numbers.
        rounded: storages that hold rounded results; `owned`: those that no in-place step may write, as leaves' are.
    """

    def __init__(self, draw: Callable[..., Any], training: bool, random: bool) -> None:
        self.draw, self.training, self.random = draw, training, random
        self.steps: list[Step] = []
        self.values: list[Tensor] = []
        self.rounded: set[int] = set()
        self.owned: set[int] = set()
        self.floats = ["float32"]

    # -- drawing ------------------------------------------------------------------------------------------------

    def choose(self, options: Any) -> Any:
        return options[self.draw(st.integers(0, len(options) - 1))]

    def chance(self, one_in: int) -> bool:
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def pick(self, fits: Callable[[Tensor], bool]) -> int | None:
        """The number of a value that fits, the latest first; None when there is none."""

        def may(value: Tensor) -> bool:
            try:
                return fits(value)
            except RuntimeError:  # torch refuses to say anything of a view whose base was written to
                return False

        found = [i for i in reversed(range(len(self.values))) if may(self.values[i])]
        return self.choose(found) if found else None

    def dim(self, x: Tensor) -> int:
        return self.draw(st.integers(0, x.dim() - 1))

    def is_rounded(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self.rounded

    # -- adding -------------------------------------------------------------------------------------------------

    def leaf(self, kind: str, shape: tuple[int, ...], dtype: str = "float32", style: Any = "signed") -> int:
        step = Step(kind, (), (tuple(shape), dtype, style, self.draw(st.integers(0, 7))))
        value = leaf_value(step)
        if self.training and kind == "parameter" and value.is_floating_point():
            value.requires_grad_()
        self.owned.add(value.untyped_storage()._cdata)
        self.steps.append(step)
        self.values.append(value)
        return len(self.values) - 1

    def weight(self, shape: tuple[int, ...], like: Tensor, style: str = "weight") -> int:
        kind = self.choose(["parameter", "parameter", "parameter", "buffer", "constant"])
        return self.leaf(kind, shape, name_of(like), style)

    def add(self, op: str, operands: tuple[int, ...], params: tuple[Any, ...] = (), rounds: bool = False) -> int | None:
        """Run one step and keep it if its results are tame; the number of its first result, or None."""
        step = Step(op, operands, params)
        try:
            if op in INPLACE:
                written = self.values[operands[0]]
                spare = {operands[0]: written.detach().clone()}
                with torch.no_grad():
                    result = apply_step(step, _Overlay(self.values, spare))
                if not tame(result):
                    return None
            result = apply_step(step, self.values)
        except (RuntimeError, IndexError, ValueError):
            return None
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if not all(tame(value) for value in results):
            return None
        rounds = rounds or any(self.is_rounded(self.values[i]) for i in operands)
        if rounds:
            self.rounded.update(value.untyped_storage()._cdata for value in results)
        if op == "eval_dropout":  # eager hands on its operand, what torch traces is a copy
            self.owned.update(value.untyped_storage()._cdata for value in results)
        self.steps.append(step)
        self.values.extend(results)
        return len(self.values) - len(results)


class _Overlay:
    def __init__(self, values: list[Tensor], replaced: dict[int, Tensor]) -> None:
        self.values, self.replaced = values, replaced

    def __getitem__(self, index: int) -> Tensor:
        return self.replaced.get(index, self.values[index])


def name_of(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def tame(x: Tensor) -> bool:
    """Whether later steps may build on the value: small enough, finite, of few elements and dimensions."""
    if x.numel() > MAX_NUMEL or x.dim() > 5:
        return False
    return x.numel() == 0 or x.dtype == torch.bool or bool(x.detach().abs().max() <= MAX_ABS)


def is_float(x: Tensor) -> bool:
    return x.dtype.is_floating_point


def is_number(x: Tensor) -> bool:
    return x.dtype != torch.bool


def broadcasts(a: torch.Size, b: torch.Size) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


def broadcasts_to(a: torch.Size, b: torch.Size) -> bool:
    return len(a) <= len(b) and all(x in (1, y) for x, y in zip(reversed(a), reversed(b), strict=False))
