"""Processes that work together; what data parallelism holds beside the model: buckets, gathered parameters."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from memopt.torch_compat.fully_sharded import Gathered, groups
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


def groups_of(model: nn.Module) -> list[Any]:
    """The process groups whose ranks train a model together: of each DistributedDataParallel, and of FSDP2's mesh."""
    if not has_group():
        return []
    found = [replica.process_group for replica in _replicas(model)]
    shard = next((group[0].shard for group, _ in groups(model) if group), None)
    if shard is not None:
        mesh = cast(Any, shard).device_mesh
        found += [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    return list(dict.fromkeys(found))


def most_of(value: int, groups: Sequence[Any], device: torch.device) -> int:
    """The most of what the ranks of all these groups call this with."""
    held = torch.tensor(value, dtype=torch.int64, device=device)
    for group in groups:
        torch.distributed.all_reduce(held, torch.distributed.ReduceOp.MAX, group=group)
    return int(held.item())


def _replicas(model: nn.Module) -> list[Any]:
    """Every DistributedDataParallel in the model, or else the one whose forward is running: it wraps the model."""
    from torch.nn.parallel import DistributedDataParallel

    found: list[Any] = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    around = running_replica()  # set while its forward runs
    return found or ([] if around is None else [around])


def buckets_of(model: nn.Module) -> Buckets:
    """Count the buckets of every DistributedDataParallel in the model, or else of the one whose forward is running.

    A reducer holds one flat buffer per bucket from its construction on, together as large as the gradients.
    """
    if not torch.distributed.is_available():
        return Buckets()
    nbytes = 0
    viewed: set[int] = set()
    for module in _replicas(model):
        named = module.module.named_parameters()
        reduced = [p for name, p in named if p.requires_grad and name not in module.parameters_to_ignore]
        nbytes += sum(p.numel() * p.element_size() for p in reduced)
        if module.gradient_as_bucket_view:
            viewed.update(id(p) for p in reduced)
    return Buckets(nbytes, frozenset(viewed))


def gathered_bytes(model: nn.Module) -> int:
    """The most bytes that FSDP2 holds beside shards and what graphs make: whole parameters, and what it sends.

    While a group's backward runs, its parameters are whole, the next group's are being gathered, and what is sent of
    the gradients of the one before is not let go of yet. In forward a group is copied out of the buffer that it was
    received in, which goes as the next one has come.
    """
    stays, passing = 0, [(0, 0)]
    for group, is_kept in groups(model):
        whole, sent = _whole_bytes(group)
        if is_kept:
            stays += whole
        passing.append((whole, sent))
    passing.append((0, 0))
    most = 0
    for (before, _), (here, _), (after, sent) in zip(passing, passing[1:], [*passing[2:], (0, 0)], strict=False):
        most = max(most, before + here + sent, here + 2 * after)
    return stays + most


def _whole_bytes(group: Sequence[Gathered]) -> tuple[int, int]:
    """Bytes of a group's parameters as they are gathered, and of its gradients as they are sent."""
    counts = [(math.prod(each.shape), each) for each in group]
    whole = sum(count * each.dtype.itemsize for count, each in counts)
    return whole, sum(count * each.reduced_dtype.itemsize for count, each in counts if each.shard.requires_grad)
