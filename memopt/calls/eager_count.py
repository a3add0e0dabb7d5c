"""What a call takes that runs eagerly, counted on fake tensors, and the state that the count holds for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.calls.guard_fast_path import Kind
from memopt.calls.refusals import state_of
from memopt.calls.start import CallStart
from memopt.capture.eager_call import SHOWN, EagerCall, eager_call
from memopt.common.kernel_settings import kernel_settings
from memopt.compilation.session import Session
from memopt.memory.cost.key import place_of
from memopt.memory.distributed import has_group
from memopt.torch_compat import pytree
from memopt.torch_compat.saved_tensors import hooks_in_force


def eager_count(
    model: nn.Module,
    session: Session,
    kind: Kind,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    around: Callable[[nn.Module], Any] | None = None,
    renews: bool = False,
) -> EagerCall | str:
    """What the call takes, counted by `eager_call`; where that is not known, or not what a real run takes, why."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    unseen = next((leaf for leaf in leaves if not isinstance(leaf, SHOWN)), None)
    if unseen is not None:
        return f"an argument is a {type(unseen).__name__}, which may hold tensors"
    if hooks_in_force():
        return "hooks on saved tensors are in force"
    if has_group():  # its twin would share what talks to other ranks
        return "processes work together"
    start = CallStart(model, (args, kwargs), state=True)  # a twin has the model's own objects
    try:
        found = eager_call(model, args, kwargs, session.table, backward=kind.gradients, around=around, renews=renews)
    finally:
        start.restore()
    if found is None:
        return "it does not run on fake tensors"
    return "its way goes by random numbers that are not drawn yet" if found.by_chance else found


def state_now(model: nn.Module, session: Session) -> Any:
    """What a call goes by beside its inputs."""
    gradients = [parameter.grad is None for parameter in model.parameters()]
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    modes = torch.is_autocast_cache_enabled(), torch.is_inference_mode_enabled()
    return state_of(model), gradients, casts, place_of(session.resident.device), modes, kernel_settings()
