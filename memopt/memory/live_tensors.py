"""The tensors of the process that are alive now, whoever made them: those of Python, and what autograd has saved."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterable

import torch

from memopt.memory.reach import is_sparse, plain_tensors
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat.saved_data import saved_behind
from memopt.torch_compat.storages import id_of_storage


@dataclasses.dataclass(frozen=True)
class Block:
    """A storage that was seen: a weak reference to it, as its number may be another one's later, and its bytes."""

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int


Blocks = dict[int, Block]


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Blocks:
    """The storages of these tensors that lie on a device, by number; none of fake tensors, nor of such without one."""
    found: Blocks = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of a subclass that shows no storage
            for part in plain_tensors(tensor) if is_sparse(tensor) or type(tensor) is not torch.Tensor else (tensor,):
                storage = part.untyped_storage()
                key = id_of_storage(storage)
                if key in found or storage.device != device or not storage.nbytes():
                    continue
                found[key] = Block(weakref.ref(storage), allocated_bytes(storage.nbytes(), device))
    return found


def live_blocks(device: torch.device) -> Blocks:
    """The storages on a device of all `live_tensors`."""
    return blocks_of(live_tensors(), device)


def python_tensors() -> list[torch.Tensor]:
    """The tensors that are Python's objects, but those that the collector of garbage was told to leave aside."""
    objects, kinds = gc.get_objects(), _Tensors()
    # A million objects is usual: they are told apart without a line of Python for each.
    return list(itertools.compress(objects, map(kinds.__getitem__, map(type, objects))))


def live_tensors() -> list[torch.Tensor]:
    """Python's tensors, their gradients and what their graphs have saved; a storage may be among them several times.

    Not shown is what only C++ holds, and objects that the collector of garbage was told to leave aside (`gc.freeze`).
    """
    tensors = python_tensors()
    nodes, gradients = [], []
    for item in tensors:
        try:
            node = item.grad_fn
        except RuntimeError:  # of a view whose base was written to since, which autograd forbids to use any more
            continue
        if node is not None:
            nodes.append(node)
        elif item.requires_grad and item.grad is not None:
            gradients.append(item.grad)
    return [*tensors, *gradients, *saved_behind(nodes)]


class _Tensors(dict[type, bool]):
    """Whether objects of a class are tensors."""

    def __missing__(self, kind: type) -> bool:
        self[kind] = found = issubclass(kind, torch.Tensor)
        return found


def alive(blocks: Blocks) -> Blocks:
    """Those of these storages that are there still."""
    return {key: block for key, block in blocks.items() if block.storage() is not None}
