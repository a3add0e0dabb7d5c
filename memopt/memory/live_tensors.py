"""The tensors of the process that are alive now, whoever made them: those of Python, and what autograd has saved."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from memopt.common.garbage import python_tensors
from memopt.memory.reach import is_sparse, plain_tensors
from memopt.memory.rounding import allocated_bytes
from memopt.torch_compat.cuda_memory import holds_its_memory
from memopt.torch_compat.saved_data import saved_behind
from memopt.torch_compat.storages import id_of_storage


@dataclasses.dataclass(frozen=True)
class Block:
    """A storage that was seen.

    Attributes:
        storage: a weak reference to it, as its number may be another one's later.
        nbytes: its bytes.
        of_graph: whether a graph whose backward has not run has made it, or has saved it and it is no parameter.
    """

    storage: weakref.ref[torch.UntypedStorage]
    nbytes: int
    of_graph: bool = False


Blocks = dict[int, Block]


def blocks_of(tensors: Iterable[torch.Tensor], device: torch.device) -> Blocks:
    """The storages of these tensors that lie on a device and hold memory there, by number.

    Those of fake tensors hold none, nor do what autograd functions have saved as they were traced, and what shows
    where a CUDA graph reads and writes.
    """
    found: Blocks = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # of a subclass that shows no storage
            for part in plain_tensors(tensor) if is_sparse(tensor) or type(tensor) is not torch.Tensor else (tensor,):
                storage = part.untyped_storage()
                key = id_of_storage(storage)
                if key in found or storage.device != device or not storage.nbytes() or not storage.data_ptr():
                    continue
                if not holds_its_memory(storage):
                    continue
                found[key] = Block(weakref.ref(storage), allocated_bytes(storage.nbytes(), device))
    return found


def live_blocks(device: torch.device) -> Blocks:
    """The storages on a device of all `live_tensors`."""
    given, made = _live_tensors()
    found, of_graphs = blocks_of(given, device), blocks_of(made, device)
    return found | {
        key: dataclasses.replace(block, of_graph=True) for key, block in of_graphs.items() if key not in found
    }


def live_tensors() -> list[torch.Tensor]:
    """Python's tensors, their gradients and what their graphs have saved; a storage may be among them several times.

    Not shown is what only C++ holds, and objects that the user had set aside (`gc.freeze`).
    """
    given, made = _live_tensors()
    return [*given, *made]


def _live_tensors() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """As `live_tensors`: those that are given or gradients, and those that graphs have made or saved."""
    given, made, nodes = list[torch.Tensor](), list[torch.Tensor](), list[Any]()
    for item in python_tensors():
        try:
            node = item.grad_fn
        except RuntimeError:  # of a view whose base was written to since, which autograd forbids to use any more
            given.append(item)
            continue
        (given if node is None else made).append(item)
        if node is not None:
            nodes.append(node)
        elif item.requires_grad and item.grad is not None:
            given.append(item.grad)
    saved = list(saved_behind(nodes))
    alone = {id(each) for each in saved if not each.requires_grad}  # once they were looked at, Python has them, too
    return [each for each in given if id(each) not in alone], [*made, *saved]


def live_bytes(device: torch.device) -> int:
    """Bytes that the process holds on a device now, whoever does; on a CPU those that are seen (`live_blocks`)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return sum(block.nbytes for block in live_blocks(device).values())


def alive(blocks: Blocks) -> Blocks:
    """Those of these storages that are there still."""
    return {key: block for key, block in blocks.items() if block.storage() is not None}
