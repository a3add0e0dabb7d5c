"""Code that Dynamo made of a function, with its guards, to be called without Dynamo; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._dynamo import eval_frame

from memopt.torch_compat.tracing_context import in_trace

# What `torch.compiler.set_stance` makes of a backend: the same where nothing was set.
_with_stance: Any = eval_frame._callback_from_stance
_ANY = object()


def entries_of(code: types.CodeType) -> list[Any]:
    """What Dynamo compiled of this code: each with its `code` and its `guard_manager`.

    Torch deletes entries when another model of the class dies: nothing may be collected while they are looked at.
    """
    return list(_debug_get_cache_entry_list(code))


def innermost(function: Any) -> Any:
    """What lies within torch.compile's wrappers around a function."""
    return eval_frame.innermost_fn(function)


def nothing_in_force() -> bool:
    """Whether nothing is in force that `torch.compile`'s wrapper, or one around it, would act upon."""
    if torch.compiler.is_compiling() or get_eval_frame_callback() is not None:
        return False
    if _with_stance(_ANY) is not _ANY or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.get_dynamic_layer_stack_depth():
        return False
    return not in_trace()
