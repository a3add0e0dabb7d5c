"""What many tests share: capture a model, apply one pass, and compare the numbers before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from memopt.capture.export import from_module
from memopt.memory.allocator_events import record
from memopt.pass_manager import Pass, PassManager, PassResult
from memopt.program import InputKind, Program


class Apply(torch.nn.Module):
    """A module that calls a function, and holds the modules that it is given by name."""

    def __init__(self, function: Callable[..., Any] | None, **modules: torch.nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args: Any) -> Any:
        assert self.function is not None
        return self.function(*args)


def capture(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Program:
    """The inference program of `model(*args, **kwargs)` in the model's present mode."""
    return from_module(model, args, kwargs)


def run(program: Program, *args: Any, seed: int = 0, **kwargs: Any) -> list[Any]:
    """Run the program on its own state and the user's arguments, under a fixed seed."""
    users = iter(pytree.tree_leaves((args, kwargs)))
    values = [
        program.state[entry.name] if entry.name in program.state else next(users)
        for entry in program.inputs
        if entry.kind is not InputKind.CONSTANT
    ]
    torch.manual_seed(seed)
    return program.run(*values)


def apply(item: Pass, program: Program) -> PassResult:
    """Run one pass and the checks of the pass manager on its result; the program given must stay as it was."""
    before = str(program.graph)
    result = item.run(program)
    assert str(program.graph) == before, "the pass edited the program that it was given"
    result.program.check()
    assert (result.program is not program) == bool(result.changes), "changes and program disagree"
    PassManager([item]).run(program)
    return result


def targets(program: Program) -> list[str]:
    """The operators called, in order, as `aten.relu.default` and the like; getitem left out."""
    return [str(node.target) for node in program.calls if "getitem" not in str(node.target)]


def assert_same(found: Any, expected: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Equal leaf by leaf: bitwise by default, else within the tolerances."""
    torch.testing.assert_close(
        pytree.tree_leaves(found), pytree.tree_leaves(expected), rtol=rtol, atol=atol, equal_nan=True
    )


def allocations(call: Callable[[], Any]) -> list[int]:
    """The signed bytes of each allocation and release of a call on the CPU, in order."""
    return [size for _, size in record(call, torch.device("cpu")).changes]


def in_one_line(error, match, call, *args, **options):
    """The call raises the error, whose message is of one line."""
    with pytest.raises(error, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
