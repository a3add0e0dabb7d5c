"""What AOTAutograd says that inputs and results of its graphs are: their roles; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._functorch._aot_autograd import descriptors


def position_given(role: Any) -> int | None:
    """Where an input stands among the arguments that AOTAutograd was given; None for what it made of them itself."""
    return role.idx if isinstance(role, descriptors.PlainAOTInput) else None


def value_given(role: Any, given: Sequence[Any]) -> Any:
    """What an input is of what AOTAutograd was given: an argument, or what an argument's own class of tensors holds.

    None for what it made itself. Tried on 2.13.
    """
    if isinstance(role, descriptors.SubclassGetAttrAOTInput):
        return getattr(value_given(role.base, given), role.attr, None)
    position = position_given(role)
    return given[position] if position is not None and position < len(given) else None


def is_tangent(role: Any) -> bool:
    """Whether an input of backward is the gradient of a result."""
    return isinstance(role, descriptors.TangentAOTInput)


def updating(role: Any) -> Any:
    """The role of a result that is the final value of an input: of the input with this role."""
    return descriptors.InputMutationAOTOutput(role)


def updated_by(role: Any) -> Any:
    """The role of the input whose final value a result is; None where it is no such value."""
    return role.mutated_input if isinstance(role, descriptors.InputMutationAOTOutput) else None


def gradient_of(role: Any) -> Any:
    """The role of the input whose gradient a result is; None where it is no gradient."""
    return role.grad_of if isinstance(role, descriptors.GradAOTOutput) else None
