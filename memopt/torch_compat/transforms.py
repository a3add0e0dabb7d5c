"""What can be in force around a call so that torch.compile does not compile it: it would run eagerly, or fail.

For transforms Dynamo even gives up the frame for good, and with it the frame of every later model that is made of
torch's own layers. Tried on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _python_dispatch


def in_force() -> str:
    """What around this call is not compiled through, as the user knows it; empty if nothing is."""
    if torch._C._functorch.get_dynamic_layer_stack_depth():
        return "a transform of torch.func (grad, vmap, jvp, functionalize)"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if _is_symbolically_traced() or get_proxy_mode() is not None:
        return "make_fx or another tracer"
    if torch._C._len_torch_dispatch_stack() and _has_users_mode():
        return "a TorchDispatchMode"
    return ""


@contextlib.contextmanager
def transforms_left() -> Iterator[None]:
    """Within: a run of a graph of Dynamo's, which enters and leaves transforms as it goes. If it fails, all are left.

    Else all that comes after would run within them, or fail at a level of forward-mode differentiation that is open.
    """
    depth, level = torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    except BaseException:
        _leave_to(depth)
        with contextlib.suppress(RuntimeError):  # there is no such level
            torch._C._exit_dual_level(level=level + 1)
        raise


def _leave_to(depth: int) -> None:
    """Leave transforms until this many are in force; torch's own function for it fails at a `jvp` in 2.11."""
    functorch = torch._C._functorch
    kinds = functorch.TransformType
    leave = {
        kinds.Grad: functorch._grad_decrement_nesting,
        kinds.Jvp: functorch._jvp_decrement_nesting,
        kinds.Vmap: functorch._vmap_decrement_nesting,
        kinds.Functionalize: functorch._func_decrement_nesting,
    }
    while functorch.get_dynamic_layer_stack_depth() > depth:
        leave[functorch.peek_interpreter_stack().key()]()


def _is_symbolically_traced() -> bool:
    asked = getattr(torch.fx._symbolic_trace, "_get_is_fx_tracing", None)  # a flag of each thread's since 2.14
    return bool(torch.fx._symbolic_trace._is_fx_tracing_flag if asked is None else asked())


def _has_users_mode() -> bool:
    asked = getattr(_python_dispatch, "any_torch_dispatch_mode_on_stack", None)
    if asked is None:  # before 2.12
        asked = _python_dispatch.is_in_any_mode_without_ignore_compile_internals
    return bool(asked())


def compiled_from(model: object) -> nn.Module | None:
    """The module that `torch.compile` made this one of; None if it made it of none."""
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(model, torch._dynamo.OptimizedModule) and isinstance(inner, nn.Module) else None


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.func's, which stands for others while a transform is in force."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))
