"""What a row runs: an engine or a peer made ready for one model, and one step of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from memopt.api import call_arguments
from memopt.api import compile as compile_model
from memopt.backends.by_name import BACKENDS
from memopt.budget import parse_budget
from memopt.comparison.blocks import checkpoint_blocks
from memopt.torch_compat import pytree
from memopt.torch_compat.aot_autograd import set_activation_budget

PEERS = ("eager", "compile", "compile:0.7", "compile:0.5", "compile:0.3", "compile:0.1", "checkpoint")
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}
# Engines that take their memory from PyTorch's allocator.
_TORCH_MEMORY = ("eager", "compile", "checkpoint", "aten", "inductor", "static")


@dataclasses.dataclass(frozen=True)
class Engine:
    """An engine or a peer, and what it is asked for: a budget for memopt's engines, a share for `compile`."""

    kind: str
    setting: str = ""

    @classmethod
    def parse(cls, name: str) -> Engine:
        """Read `aten`, `inductor:8GB`, `eager`, `compile:0.5` or `checkpoint`.

        Raises:
            ValueError: no such engine or peer, or a setting that it does not take.
        """
        kind, _, setting = name.partition(":")
        known = (*BACKENDS, *dict.fromkeys(peer.partition(":")[0] for peer in PEERS))
        if kind not in known:
            raise ValueError(f"unknown engine {kind!r}: use one of {', '.join(known)}")
        if setting and kind == "compile":
            if not 0 <= float(setting) <= 1:
                raise ValueError(f"{name}: activation_memory_budget is a share between 0 and 1")
        elif setting and kind in BACKENDS:
            parse_budget(setting)
        elif setting:
            raise ValueError(f"{name}: {kind} takes no setting")
        return cls(kind, setting)

    @property
    def name(self) -> str:
        """As `parse` reads it."""
        return f"{self.kind}:{self.setting}" if self.setting else self.kind

    @property
    def is_peer(self) -> bool:
        """Whether it is not memopt's."""
        return self.kind in ("eager", "compile", "checkpoint")

    @property
    def in_torch_memory(self) -> bool:
        """Whether PyTorch's allocator sees all of its memory."""
        return self.kind in _TORCH_MEMORY

    def ready(self, model: nn.Module, training: bool, optimizer: torch.optim.Optimizer | None) -> Callable[..., Any]:
        """The model's stand-in that runs a step on this engine; it may compile at its first call.

        Raises:
            ValueError: a peer that saves memory of training only was asked for inference, or it has nothing to wrap.
        """
        if not self.is_peer:
            return compile_model(model, self.setting or None, backend=self.kind, optimizer=optimizer)
        if not training and (self.kind == "checkpoint" or self.setting):
            raise ValueError("saves memory of a training step: there is nothing to save in inference")
        if self.kind == "compile":
            if self.setting:
                set_activation_budget(float(self.setting))
            return torch.compile(model)
        if self.kind == "checkpoint":
            checkpoint_blocks(model)
        return model


def loss_of(out: Any) -> torch.Tensor:
    """The scalar that a training step goes back from: a scalar result, `.loss`, or the sum of the results' means.

    Raises:
        ValueError: no result has a gradient.
    """
    named = getattr(out, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not leaves:
        raise ValueError("no result of the model has a gradient: nothing to train")
    if len(leaves) == 1 and leaves[0].numel() == 1:
        return leaves[0].reshape(())
    return torch.stack([leaf.mean() for leaf in leaves]).sum()


def placed(model: nn.Module, inputs: Any, device: torch.device, dtype: torch.dtype | None) -> tuple[nn.Module, Any]:
    """The model and its inputs on the device, floating-point parameters, buffers and inputs in the dtype."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to(device, dtype) if leaf.is_floating_point() else leaf.to(device)

    return model.to(device, dtype), pytree.tree_map(move, inputs)


def call(run: Callable[..., Any], inputs: Any) -> Any:
    """Run on example inputs: a mapping is keyword arguments, a tuple or list positional ones, all else is one."""
    args, kwargs = call_arguments(inputs)
    return run(*args, **kwargs)
