"""Tensors that are alike in one line; names of weights and of what belongs to them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memopt.memory.reach import held_tensors, plain_tensors, storages_of
from memopt.monitoring.lines import said
from memopt.monitoring.record import TensorGroup
from memopt.monitoring.tracker import Made
from memopt.report.side_by_side import any_block

WEIGHTS = ("parameter", "buffer", "gradient", "optimizer state")


def grouped(found: Iterable[Made]) -> tuple[TensorGroup, ...]:
    """Tensors that are alike together, the largest group first; modules that differ in numbers only are alike."""
    groups: dict[Any, list[Made]] = defaultdict(list)
    for made in found:
        origin = made.origin
        groups[origin._replace(module=any_block(origin.module))].append(made)
    records = [_record(members) for members in groups.values()]
    return tuple(sorted(records, key=lambda group: -group.bytes))


def _record(members: list[Made]) -> TensorGroup:
    origin = members[0].origin
    module = origin.module if len({made.origin.module for made in members}) == 1 else any_block(origin.module)
    return TensorGroup(
        count=len(members),
        bytes=sum(made.nbytes for made in members),
        shape=origin.shape,
        dtype=str(origin.dtype).removeprefix("torch."),
        phase=origin.phase,
        module=module,
        line=said(origin.place),
        operator=str(getattr(origin.operator, "overloadpacket", origin.operator or "")),
    )


def weights(models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, tuple[str, str]]:
    """By storage: what it is to its model, one of `WEIGHTS`, and its name."""
    found: dict[int, tuple[str, str]] = {}
    for key, what in _weights(models, optimizers):
        found.setdefault(key, what)
    return found


def _weights(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[tuple[int, tuple[str, str]]]:
    names: dict[int, str] = {}
    for model in models:
        for name, weight in model.named_parameters():
            names[id(weight)] = name
            yield from _parts(weight, "parameter", name)
            if weight.grad is not None:
                yield from _parts(weight.grad, "gradient", name)
        for name, buffer in model.named_buffers():
            yield from _parts(buffer, "buffer", name)
    for optimizer in optimizers:
        for stepped, state in list(optimizer.state.items()):
            for tensor in held_tensors(state):
                yield from _parts(tensor, "optimizer state", names.get(id(stepped), ""))


def _parts(tensor: torch.Tensor, what: str, name: str) -> Iterator[tuple[int, tuple[str, str]]]:
    for key in storages_of(plain_tensors(tensor)):
        yield key, (what, name)
