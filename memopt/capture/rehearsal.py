"""A step rehearsed on fake tensors: what eager itself holds in it, and what runs outside of captured graphs holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.capture.eager_step import roots_of
from memopt.capture.shadow import Shadow
from memopt.errors import first_line
from memopt.memory.hidden import WholeLedger
from memopt.random_streams import streams_kept
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import TorchDispatchMode

log = logging.getLogger("memopt")


def ledger_for(model: nn.Module) -> WholeLedger | None:
    """A ledger under which Dynamo compiles; None where this version of torch has none, or the model no parameters."""
    parameter = next(model.parameters(), None)
    if parameter is None or not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return None
    return WholeLedger(parameter.device if not parameter.is_meta else torch.device("cpu"))


def run_backward(outputs: Any, ledger: WholeLedger, *, counted: bool = False) -> None:
    """Backward from these outputs where they require gradients; the outputs' own gradients are counted or not."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if leaves:
        ledger.counting = counted
        tangents = [torch.ones_like(leaf) for leaf in leaves]
        ledger.counting = True
        torch.autograd.backward(leaves, tangents)


def eager_step(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The most bytes that the model's own step makes, forward and backward, as PyTorch runs it with its checkpoints.

    Returns:
        The peak above parameters, buffers, and arguments; None where the model cannot run on fake tensors.
    """
    shadow, ledger = Shadow(model), ledger_for(model)
    if ledger is None:
        return None
    fake_args, fake_kwargs = shadow.inputs(args, kwargs)
    try:
        with shadow.mode, ledger, streams_kept():
            run_backward(roots_of(shadow.model(*fake_args, **fake_kwargs)), ledger, counted=True)
    except Exception as error:  # whatever the user's operators do on fake tensors
        log.info("eager's own step is not known: %s", first_line(error))
        return None
    return ledger.peak
