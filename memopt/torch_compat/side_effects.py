"""What a function that Dynamo is compiling leaves behind beside its result; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import sys
from typing import Any

from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.base import AttributeMutation, AttributeMutationNew, ValueMutationNew

_COMPILES = "call_user_compiler"


def leaves_more_than_its_result() -> bool:
    """Whether the function writes values to objects that were there before, other than numbers, names and the like.

    To be asked by a backend while it is given the function's graph. Where Dynamo cannot be asked, the answer is yes.
    """
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_name != _COMPILES:
        frame = frame.f_back
    effects = None if frame is None else getattr(frame.f_locals.get("self"), "side_effects", None)
    if effects is None or getattr(effects, "tensor_hooks", None):
        return True
    return any(_is_kept(effects, variable) for variable in effects._get_modified_vars())


def _is_kept(effects: Any, variable: Any) -> bool:
    mutation = variable.mutation_type
    of_global = type(variable).__name__ == "NewGlobalVariable"
    written = effects.store_attr_mutations.get(variable)
    if isinstance(mutation, (AttributeMutationNew, ValueMutationNew)) and not of_global:
        return isinstance(variable, TensorVariable) and bool(written)  # who has the one tensor finds others through it
    if written is None or not (of_global or isinstance(mutation, AttributeMutation)):
        return True
    return not all(value.is_python_constant() for value in written.values())
