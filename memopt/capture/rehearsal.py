"""A step rehearsed on fake tensors: what runs outside of captured graphs holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memopt.memory.hidden import WholeLedger
from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import TorchDispatchMode


def ledger_for(model: nn.Module) -> WholeLedger | None:
    """A ledger under which Dynamo compiles; None where this version of torch has none, or the model no parameters."""
    parameter = next(model.parameters(), None)
    if parameter is None or not hasattr(TorchDispatchMode, "ignore_compile_internals"):
        return None
    return WholeLedger(parameter.device if not parameter.is_meta else torch.device("cpu"))


def run_backward(outputs: Any, ledger: WholeLedger) -> None:
    """Backward from these outputs where they require gradients; the outputs' own gradients are not counted."""
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if leaves:
        with ledger.ignoring():
            tangents = [torch.ones_like(leaf) for leaf in leaves]
        torch.autograd.backward(leaves, tangents)
