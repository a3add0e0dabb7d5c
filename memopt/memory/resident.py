"""What the device holds during the whole of a step, beside what the step itself makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.rounding import allocated_bytes


@dataclasses.dataclass(frozen=True)
class Resident:
    """What the device holds during the whole step, in bytes.

    Attributes:
        parameters: by storage; tied weights once.
        buffers: by storage.
        inputs: the caller's tensors.
        gradients: that exist already when the step begins (accumulation).
        optimizer: the optimizer's state, and its temporaries while it steps; None without an optimizer.
        trainable: bytes of all gradients of trainable parameters together.
        libraries: what libraries keep for themselves of the allocator's memory.
        device: where all this is.
    """

    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer: OptimizerFootprint | None = None
    trainable: int = 0
    libraries: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def optimizer_state(self) -> int:
        """Bytes of the optimizer's state."""
        return self.optimizer.state_bytes if self.optimizer else 0

    @property
    def coming(self) -> int:
        """The part of it that the first steps will make."""
        return self.optimizer.state_bytes - self.optimizer.existing_state_bytes if self.optimizer else 0

    @property
    def total(self) -> int:
        """Everything that is there during forward and backward."""
        return self.parameters + self.buffers + self.inputs + self.gradients + self.optimizer_state + self.libraries


def storage_bytes(tensors: Sequence[Any], device: torch.device | None = None) -> int:
    """Bytes that the distinct storages of the tensors take of their allocators, or would take on `device`."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = allocated_bytes(storage.nbytes(), device or storage.device)
    return sum(found.values())
