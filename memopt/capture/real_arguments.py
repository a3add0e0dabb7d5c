"""The caller's own tensors as arguments of a captured program, for as long as they live.

A trial step runs on them, so that it takes no second set of inputs. They are no part of the program: nothing may depend
on their values but what a trial measures.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.program import InputKind, Program, describe
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.roles import position_given, value_given

_KEY = "memopt_argument"


def note_arguments(program: Program, given: Sequence[Any]) -> None:
    """Note on the program's user inputs which of the caller's tensors they are, without keeping those alive.

    Those that a tensor of a class of its own holds (the values of a jagged one) are inputs each.

    Args:
        program: as captured.
        given: what the graph was called with, in AOTAutograd's order.
    """
    for entry, node in zip(program.inputs, program.placeholders, strict=True):
        if entry.kind is InputKind.USER:
            value = value_given(node.meta.get("desc"), given)
            if type(value) is torch.Tensor and not (value.is_conj() or value.is_neg() or value.is_meta):
                node.meta[_KEY] = weakref.ref(value)


def real_argument(node: fx.Node) -> torch.Tensor | None:
    """The caller's tensor, detached; None where none was noted, it is gone, or it is not as the graph wants it."""
    value = node.meta[_KEY]() if _KEY in node.meta else None
    fake = node.meta.get("val")
    if value is None or isinstance(value, FakeTensor) or not isinstance(fake, torch.Tensor):
        return None
    return value.detach() if describe(value) == describe(fake) else None


def position_of(placeholder: fx.Node) -> int | None:
    """Where the input stands among the arguments that AOTAutograd was given; None for what it made itself."""
    return position_given(placeholder.meta.get("desc"))
