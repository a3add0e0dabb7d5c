"""What stands between a call of an operator and its kernel: dispatch modes, autocast, classes of tensors.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Within: no dispatch mode is in force, fake tensors' neither; real tensors are made and computed with."""
    return _disable_current_modes()


def no_autocast() -> contextlib.AbstractContextManager[Any]:
    """Within: autocast changes no operator, on any device."""
    return torch._C._DisableAutocast()


def no_python_dispatch() -> contextlib.AbstractContextManager[Any]:
    """Within: operators see through classes of tensors to the memory that they have of their own."""
    return torch._C._DisableTorchDispatch()


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor of a class that wraps other tensors, which torch.compile traces through."""
    return is_traceable_wrapper_subclass(value)


def function_modes() -> int:
    """How many `TorchFunctionMode`s are in force in this thread."""
    return int(torch._C._len_torch_function_stack())


def dispatches_itself(kind: type[torch.Tensor]) -> bool:
    """Whether a class of tensors says what operators do with it, and not only what torch's functions do."""
    return kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def has_kernel(operator: str, key: str) -> bool:
    """Whether an operator has a kernel of its own for a dispatch key.

    Args:
        operator: with namespace, `aten::gelu`.
        key: `CUDA`, say.
    """
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, key))


@contextlib.contextmanager
def as_in_eager(*, gradients: bool) -> Iterator[None]:
    """Within, in an operator's kernel: functions of torch's run as they do where a user calls them.

    Args:
        gradients: whether autograd follows them.
    """
    left_out = torch._C._dispatch_tls_local_exclude_set() & _beside_autograd()
    own = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set() | own, left_out))
        # Tracers put decompositions in Python in the place of what a function of C++ is composed of.
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch.set_grad_enabled(gradients))
        yield


@functools.cache
def _beside_autograd() -> Any:
    """All of the dispatcher's keys but those of autograd; whether autocast is on is a key too."""
    keys: Any = torch._C._after_autograd_keyset
    for name, key in torch._C.DispatchKey.__members__.items():
        if name.startswith("Autocast"):
            keys = keys | torch._C.DispatchKeySet(key)
    return keys
