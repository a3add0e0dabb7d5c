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
from memopt.memory.optimizers import Counted, count, listed
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
    dynamic: bool | None = None  # whether sizes are symbols; None: those that were seen to vary
    target: Device | None = None  # a device that this machine may not have, to be planned for

    def counted(self, parameters: Sequence[torch.Tensor]) -> Counted | None:
        """What the optimizers hold and take for these parameters; None without any."""
        return None if self.optimizer is None else count(listed(self.optimizer), parameters, self.place)

    @property
    def place(self) -> torch.device | None:
        """The device to plan for, where it is not the model's own."""
        return None if self.target is None else first_of(self.target.type)
