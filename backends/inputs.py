"""What a compiled program may be called with: tensors like those that it was planned for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memopt.program import InputKind, Program, describe


class UserInputs:
    """Checks the caller's tensors at every call.

    Attributes:
        positions: of the caller's tensors among the inputs that are no constants.
        count: how many such inputs there are.
    """

    def __init__(self, program: Program) -> None:
        """Note what the program's inputs look like."""
        entries = [entry for entry in program.inputs if entry.kind is not InputKind.CONSTANT]
        values = {node.name: node.meta["val"] for node in program.placeholders}
        self.count = len(entries)
        self._planned = [
            (index, entry.name, values[entry.name], _signature(values[entry.name]))
            for index, entry in enumerate(entries)
            if entry.kind is InputKind.USER and isinstance(values[entry.name], torch.Tensor)
        ]
        self.positions = tuple(index for index, *_ in self._planned)

    def unboxed(self, args: list[Any]) -> tuple[Any, ...]:
        """The values of a boxed call, which are taken out of its list, checked.

        Raises:
            TypeError, ValueError: see `check`.
        """
        values = tuple(args)
        args.clear()
        self.check(values)
        return values

    def check(self, values: Sequence[Any]) -> None:
        """Raise where the program cannot be called with these values.

        Raises:
            TypeError: there are more or fewer values than inputs.
            ValueError: an input has another shape, layout, dtype or device than was planned for.
        """
        if len(values) != self.count:
            raise TypeError(f"the program takes {self.count} arguments, {len(values)} were given")
        for index, name, planned, signature in self._planned:
            value = values[index]
            if _signature(value) != signature and not _same_layout(value, planned):
                raise ValueError(f"input {name} is {_named(value)}, but the plan is for {_named(planned)}")


def _signature(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value)
    return value.shape, value.stride(), value.dtype, value.device


def _same_layout(value: Any, planned: torch.Tensor) -> bool:
    """Whether the two differ at most in strides that no element sees."""
    if not isinstance(value, torch.Tensor):
        return value is None and not planned.numel()  # a token, which orders effects
    seen = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (value, planned)]
    kind = (value.shape, value.dtype, value.device) == (planned.shape, planned.dtype, planned.device)
    return kind and (seen[0] == seen[1] or not value.numel())


def _named(value: Any) -> str:
    return describe(value) if isinstance(value, torch.Tensor) else repr(value)
