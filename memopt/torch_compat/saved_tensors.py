"""Hooks on what autograd saves for backward: torch.utils.checkpoint's, save_on_cpu's or the user's own.

Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
from torch.utils import checkpoint

from memopt.common.own_files import MEMOPT
from memopt.torch_compat.source_files import TORCH

_enabled: Callable[[], bool] | None = getattr(torch._C._autograd, "_saved_tensors_hooks_is_enabled", None)


def hooks_in_force() -> bool:
    """Whether what is saved for backward now passes through hooks: they may read it, copy it or drop it."""
    return bool(torch._C._autograd._top_saved_tensors_default_hooks(True))


def in_checkpoint() -> bool:
    """Whether code runs within torch.utils.checkpoint (`use_reentrant=False`), which runs it again in backward."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return bool(hooks) and getattr(hooks[0], "__module__", "") == checkpoint.__name__


def hooks_allowed() -> bool:
    """Whether hooks may be set here: `disable_saved_tensors_hooks` forbids it."""
    return _enabled is None or bool(_enabled())


def is_from_hooks(error: Exception) -> bool:
    """Whether an error comes from a hook: the user's own, or a checkpoint's that has all it wants to recompute."""
    if isinstance(error, getattr(checkpoint, "_StopRecomputationError", ())):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    return hooks_in_force() and os.path.isfile(file) and not os.path.abspath(file).startswith((TORCH, MEMOPT))


@contextlib.contextmanager
def saved_as_it_is() -> Iterator[None]:
    """Within: what is saved for backward is kept, whatever hooks are in force around.

    Those are of the user's step. A step that is only tried, on fake tensors say, is not to reach them: a checkpoint
    would count its tensors among those of the call, and run that call again within its own planning.
    """
    if not hooks_in_force():
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        yield


def _same(value: torch.Tensor) -> torch.Tensor:
    return value
