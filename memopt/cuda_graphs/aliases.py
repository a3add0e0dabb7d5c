"""Outputs that alias memory which is written over: a caller has them until it lets go of them, or they are copied.

Gradients of a captured step lie in its CUDA graphs' memory. Most training lets go of them before the next step; to copy
all of them out would take as much memory again. Work on other streams must have read them when they are let go of:
torch does not pass `record_stream` on for memory that its allocator has not given out itself.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memopt.torch_compat.cuda_memory import storage_of_memory


class AliasedOutputs:
    """Tensors on the memory of others, of which it is seen whether somebody holds them still."""

    def __init__(self, memory: Any = None) -> None:
        """There are none yet; `memory` holds theirs, and is held as long as somebody holds one."""
        self._aliases = _Aliases(memory)
        self._tensors: list[weakref.ref[torch.Tensor]] = []
        # Compiled code may be let go of, and this with it, while a caller holds gradients.
        weakref.finalize(self, _keep, self._aliases).atexit = False

    def alias(self, values: Sequence[Any]) -> list[Any]:
        """Tensors at the same addresses as these, for a caller; what is no tensor comes as it is."""
        _kept[:] = [aliases for aliases in _kept if aliases.held()]
        storages: dict[int, Any] = {}
        found = []
        for value in values:
            if isinstance(value, torch.Tensor):
                value = view(storage_at(value, storages), value)
                self._tensors.append(weakref.ref(value))
            found.append(value)
        self._aliases.storages = {address: seen(storage) for address, storage in storages.items()}
        return found

    def held(self) -> set[int]:
        """The addresses of what somebody holds."""
        return self._aliases.held()

    def copy_out(self, others: Callable[[], Iterable[torch.Tensor]]) -> bool:
        """Give what is held memory of its own; whether none is held afterwards.

        Args:
            others: tells tensors that may share the memory of the outputs: gradients of parameters.
        """
        held = self.held()
        if held:
            for tensor in (*others(), *(reference() for reference in self._tensors)):
                if tensor is not None and address_of(tensor) in held:
                    tensor.data = tensor.detach().clone()
        if held and self.held():
            return False
        self._aliases.memory, self._aliases.storages, self._tensors = None, {}, []
        return True


@dataclasses.dataclass(eq=False)
class _Aliases:
    """The memory that outputs alias, and storages on it by their addresses."""

    memory: Any
    storages: dict[int, StorageWeakRef] = dataclasses.field(default_factory=dict)

    def held(self) -> set[int]:
        return {address for address, storage in self.storages.items() if not _is_gone(storage)}


# What somebody still held in a way that was not found when the outputs were given up.
_kept: list[_Aliases] = []


def _keep(aliases: _Aliases) -> None:
    """Hold the memory of outputs that are given up as long as somebody holds something of it."""
    if aliases.held():
        _kept.append(aliases)


def seen(storage: Any) -> StorageWeakRef:
    """A storage, whose memory is not held by that."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_gone(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]


def storage_at(value: torch.Tensor, known: dict[int, Any]) -> Any:
    """A storage on a tensor's memory that does not hold it: that of `known`, by address, or a new one, then known."""
    address = address_of(value)
    if address not in known:
        storage = value.untyped_storage()
        known[address] = storage_of_memory(storage.data_ptr(), storage.device, storage.nbytes())
    return known[address]


def view(storage: Any, like: torch.Tensor) -> torch.Tensor:
    """A tensor on a storage, as another one lies on its own."""
    made = torch.empty(0, dtype=like.dtype, device=like.device)
    return made.set_(storage, like.storage_offset(), like.shape, like.stride())


def address_of(value: torch.Tensor) -> int:
    """Where a tensor's storage begins."""
    return value.untyped_storage().data_ptr()
