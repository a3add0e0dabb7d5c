"""Processes that work together; what data parallelism holds beside the model: buckets, gathered parameters."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from memopt.memory.reach import plain_tensors
from memopt.torch_compat.fully_sharded import groups
from memopt.torch_compat.modules import running_replica
from memopt.torch_compat.storages import is_tracked_view

# Those whose gradients were seen outside of their buckets: a step that begins otherwise for once changes no plan.
_apart: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The buckets in which gradients are reduced.

    Attributes:
        nbytes: of all buckets.
        viewed: ids of the parameters whose gradients are views of a bucket: they take no memory of their own.
        reduced: ids of all parameters whose gradients are reduced.
    """

    nbytes: int = 0
    viewed: frozenset[int] = frozenset()
    reduced: frozenset[int] = frozenset()


def has_group() -> bool:
    """Whether this process works together with others: torch's default process group is there."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def groups_of(model: nn.Module) -> list[Any]:
    """The process groups whose ranks train a model together: of each DistributedDataParallel, and of shards' meshes."""
    if not has_group():
        return []
    found = [replica.process_group for replica in _replicas(model)]
    sharded = [group[0].shard for group, _ in groups(model) if group][:1]  # parameters may be whole by now
    sharded += [value for value in model.parameters() if hasattr(value, "device_mesh")]
    for mesh in dict.fromkeys(cast(Any, value).device_mesh for value in sharded):
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


def is_replica(model: nn.Module) -> bool:
    """Whether the model is DistributedDataParallel around another one."""
    return has_group() and _replicas(model)[:1] == [model]


def buckets_of(model: nn.Module) -> Buckets:
    """Count the buckets of every DistributedDataParallel in the model, or else of the one whose forward is running.

    A reducer holds one flat buffer per bucket from its construction on, together as large as the gradients.
    """
    if not has_group():
        return Buckets()
    nbytes = 0
    viewed: set[int] = set()
    every: set[int] = set()
    for module in _replicas(model):
        named = module.module.named_parameters()
        reduced = [p for name, p in named if p.requires_grad and name not in module.parameters_to_ignore]
        nbytes += sum(p.numel() * p.element_size() for p in reduced)
        every.update(id(p) for p in reduced)
        if module.gradient_as_bucket_view and not _accumulates_apart(module, reduced):
            viewed.update(id(p) for p in reduced)
    return Buckets(nbytes, frozenset(viewed), frozenset(every))


def _accumulates_apart(replica: Any, reduced: Sequence[nn.Parameter]) -> bool:
    """Whether gradients are accumulated in memory of their own, for all that they are to be views of buckets.

    They become views as they are reduced. A loop that sets them to None and begins in `no_sync` sums them up before.
    """
    if torch.is_grad_enabled() and replica not in _apart:
        there = [p.grad for p in reduced if p.grad is not None]
        begins = not replica.require_backward_grad_sync and len(there) < len(reduced)
        if begins or not all(_is_of_bucket(gradient) for gradient in there):
            _apart.add(replica)
    return replica in _apart


def _is_of_bucket(gradient: torch.Tensor) -> bool:
    return is_tracked_view(gradient) or gradient.untyped_storage().nbytes() > gradient.nbytes


def gathered_bytes(model: nn.Module) -> int:
    """The most bytes that FSDP2 holds beside shards and what graphs make: whole parameters, and what it sends.

    What arrives lies in memory of a stream of its own, which no other reuses: a group's is there until the next one's
    has come. On CUDA what stays whole of the root arrives before anything else is there, in memory that all else reuses
    (`memopt.torch_compat.sharded_gradients`). While a group's backward runs, its parameters are whole and what is sent
    of the gradients of the one after it is not let go of yet. Gradients of a group whose parameters stay whole are sent
    when all of backward has run: see `sent_last_bytes`.
    """
    stays = 0
    arrives, whole_now, sent_now = [], [], []
    for number, (group, is_kept) in enumerate(groups(model)):
        whole, sent = sum(each.whole_bytes for each in group), sum(each.sent_bytes for each in group)
        stays += whole if is_kept else 0
        reuses = is_kept and number == 0 and any(part.is_cuda for each in group for part in plain_tensors(each.shard))
        arrives.append(0 if reuses else whole)
        whole_now.append(0 if is_kept else whole)
        sent_now.append(0 if is_kept else sent)
    arriving = max((here + after for here, after in itertools.pairwise([*arrives, 0])), default=0)
    behind = itertools.chain(sent_now[1:], [0])
    return stays + arriving + max(map(operator.add, whole_now, behind), default=0)


def sent_last_bytes(model: nn.Module) -> int:
    """Bytes that FSDP2 holds beside all gradients when it sends those of a group whose parameters have stayed whole.

    That is when all of backward has run. The parameters are let go of before, their gradients are there instead until
    they are copied into what is sent, and the group's shards of the gradients come only then.
    """
    return max((max(0, sent - min(whole, shards)) for whole, sent, shards in _kept(model)), default=0)


def sent_in_blocks_bytes(model: nn.Module) -> int:
    """Bytes of the blocks in which FSDP2 sends those gradients, and in which their shards arrive."""
    return max((sent + shards for _, sent, shards in _kept(model)), default=0)


def _kept(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Of each group whose parameters stay whole: bytes of these, of their gradients as sent, and of these' shards."""
    for group, is_kept in groups(model):
        if is_kept:
            parts = (part for each in group if each.sent_bytes for part in plain_tensors(each.shard))
            whole, sent = sum(each.whole_bytes for each in group), sum(each.sent_bytes for each in group)
            yield whole, sent, sum(part.nbytes for part in parts)
