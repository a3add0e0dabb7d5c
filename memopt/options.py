"""What `memopt.compile` was asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from memopt.budget import Budget
from memopt.engine import Engine
from memopt.evidence import Verification
from memopt.memory.cost.devices import Device
from memopt.memory.cost.elsewhere import first_of
from memopt.memory.optimizer import OptimizerFootprint, optimizer_footprint
from memopt.pass_manager import Pass


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of a compilation. The optimizer is only looked at, never stepped."""

    budget: Budget | None
    optimizer: Any
    engine: Engine
    passes: tuple[Pass, ...] | None
    verify: Verification
    notes: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    target: Device | None = None  # a device that this machine may not have, to be planned for

    def footprint(self, parameters: Sequence[torch.Tensor]) -> OptimizerFootprint | None:
        """What the optimizer holds and takes for these parameters; None without an optimizer."""
        return None if self.optimizer is None else optimizer_footprint(self.optimizer, parameters, self.place)

    @property
    def place(self) -> torch.device | None:
        """The device to plan for, where it is not the model's own."""
        return None if self.target is None else first_of(self.target.type)
