"""Processes that work together; what data parallelism holds on the device beside the model: buckets."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from memopt.torch_compat.modules import running_replica


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The buckets in which gradients are reduced.

    Attributes:
        nbytes: of all buckets.
        viewed: ids of the parameters whose gradients are views of a bucket: they take no memory of their own.
    """

    nbytes: int = 0
    viewed: frozenset[int] = frozenset()


def has_group() -> bool:
    """Whether this process works together with others: torch's default process group is there."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def buckets_of(model: nn.Module) -> Buckets:
    """Count the buckets of every DistributedDataParallel in the model, or else of the one whose forward is running.

    A reducer holds one flat buffer per bucket from its construction on, together as large as the gradients.
    """
    if not torch.distributed.is_available():
        return Buckets()
    from torch.nn.parallel import DistributedDataParallel

    found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    around = running_replica()  # set while its forward runs: it wraps the compiled model
    if not found and around is not None:
        found = [around]
    nbytes = 0
    viewed: set[int] = set()
    for module in found:
        named = module.module.named_parameters()
        reduced = [p for name, p in named if p.requires_grad and name not in module.parameters_to_ignore]
        nbytes += sum(p.numel() * p.element_size() for p in reduced)
        if module.gradient_as_bucket_view:
            viewed.update(id(p) for p in reduced)
    return Buckets(nbytes, frozenset(viewed))
