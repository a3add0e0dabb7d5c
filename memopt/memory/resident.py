"""What the device holds during the whole of a step, beside what the step itself makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from memopt.memory.allocator import library_bytes
from memopt.memory.distributed import buckets_of, gathered_bytes, sent_in_blocks_bytes, sent_last_bytes
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.reach import plain_tensors
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat import pytree
from memopt.torch_compat.storages import id_of_storage


@dataclasses.dataclass(frozen=True)
class Resident:
    """What the device holds during the whole step, in bytes.

    Attributes:
        parameters: by storage; tied weights once.
        buffers: by storage; with them what data parallelism holds: buckets, parameters that are gathered.
        attributes: of these, tensors that the model holds beside parameters and buffers.
        inputs: the caller's tensors.
        gradients: that exist already when the step begins (accumulation).
        optimizer: the optimizer's state, and its temporaries while it steps; None without an optimizer.
        trainable: bytes of all gradients of trainable parameters together, but for those that hooks use and drop.
        differentiated: bytes of the parameters that have gradients, whoever uses these.
        loss: what a loop holds while the optimizer steps.
        stepping: what optimizers take for a moment that such hooks step within backward.
        sent_last: what data parallelism sends of gradients when backward has run, beside all of them.
        sent_in_blocks: of the blocks that this takes, with what comes of it.
        outside: held beside what is planned: by earlier calls of the step, and by parts that are not captured.
        others: tensors of the process that are no part of the model's step: another model, an average, a data set.
        coming_beside: gradients that other models of the budget will have as an optimizer steps, and have not now.
        libraries: what libraries keep for themselves of the allocator's memory.
        device: where all this is.
    """

    parameters: int = 0
    buffers: int = 0
    attributes: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer: OptimizerFootprint | None = None
    trainable: int = 0
    loss: int = 0
    stepping: int = 0
    sent_last: int = 0
    sent_in_blocks: int = 0
    libraries: int = 0
    outside: int = 0
    others: int = 0
    coming_beside: int = 0
    differentiated: int = 0
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))

    @property
    def optimizer_state(self) -> int:
        """Bytes of the optimizer's state."""
        return self.optimizer.state_bytes if self.optimizer else 0

    @property
    def beside_gradients(self) -> int:
        """The most bytes for a moment beside all gradients: of the optimizer's step, or what is sent before it."""
        return max(self.sent_last, self.optimizer.step_peak_bytes if self.optimizer else 0)

    @property
    def coming(self) -> int:
        """The part of it that the first steps will make."""
        return self.optimizer.state_bytes - self.optimizer.existing_state_bytes if self.optimizer else 0

    @property
    def total(self) -> int:
        """Everything that is there during forward and backward."""
        held = self.parameters + self.buffers + self.inputs + self.gradients + self.optimizer_state
        return held + self.stepping + self.libraries + self.outside + self.others


def storage_bytes(tensors: Sequence[Any], device: torch.device | None = None) -> int:
    """Bytes that the distinct storages of the tensors take of their allocators, or would take on `device`."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for plain in plain_tensors(tensor) if isinstance(tensor, torch.Tensor) else ():
            storage = plain.untyped_storage()
            found[id_of_storage(storage)] = allocated_bytes(storage.nbytes(), device or storage.device)
    return sum(found.values())


def _local(parameter: torch.Tensor) -> Iterable[torch.Tensor]:
    """What this process has of a parameter; all of it, unless it is sharded."""
    return plain_tensors(parameter) if hasattr(parameter, "to_local") else (parameter,)


def resident_of(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    footprint: OptimizerFootprint | None,
    accumulating: bool,
    device: torch.device | None = None,
    handed: frozenset[str] = frozenset(),
    stepping: int = 0,
    added: frozenset[str] = frozenset(),
    attributes: int = 0,
) -> Resident:
    """Count what the device holds during the whole step, by storage; on `device`, where it is not the tensors' own.

    Args:
        model: whose tensors there are.
        args, kwargs: of its call.
        footprint: of its optimizers.
        accumulating: whether gradients exist, and stay.
        device: where to count; None: where the tensors are.
        handed: names of the parameters whose gradients hooks use and drop within backward.
        stepping: bytes that optimizers take which such hooks step.
        attributes: bytes of tensors that the model holds beside parameters, buffers and what is given.
        added: names of the parameters whose gradients are counted though they are gone: backward gives these early.
    """
    dropped = {id(parameter) for name, parameter in model.named_parameters() if name in handed} if handed else set()
    parameters = list(model.parameters())
    buckets = buckets_of(model)
    own = [parameter for parameter in parameters if id(parameter) not in buckets.viewed]
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    coming = [parameter for name, parameter in model.named_parameters() if name in added and parameter.grad is None]
    tensors = [*parameters, *(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))]
    home = device or (tensors[0].device if tensors else torch.device("cpu"))
    return Resident(
        parameters=storage_bytes(parameters, device),
        buffers=storage_bytes(list(model.buffers()), device) + buckets.nbytes + gathered_bytes(model) + attributes,
        attributes=attributes,
        inputs=storage_bytes(pytree.tree_leaves((args, kwargs)), device),
        gradients=storage_bytes(gradients, device) + storage_bytes(coming, device) if accumulating else 0,
        optimizer=footprint,
        trainable=sum(
            allocated_bytes(part.numel() * part.element_size(), device or part.device)
            for parameter in own
            if parameter.requires_grad and id(parameter) not in dropped
            for part in _local(parameter)
        ),
        differentiated=storage_bytes([each for each in parameters if each.requires_grad], device),
        loss=allocated_bytes(torch.float32.itemsize, home),
        stepping=stepping if handed else 0,
        sent_last=sent_last_bytes(model),
        sent_in_blocks=sent_in_blocks_bytes(model),
        libraries=library_bytes(home),
        device=home,
    )
