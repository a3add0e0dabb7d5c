"""A few bytes that tell whether a tensor holds what it held: writes through `tensor.data` leave no other trace."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from memopt.memory.reach import plain_tensors

# Words are summed in so many columns, so that what only changes places is seen as well; a prime, as no shape's sizes.
_COLUMNS = 1021
_WORD = 8  # bytes
# On the CPU, up to so many bytes are read by one thread where they lie: sums would take a part of a small budget.
_IN_PLACE = 2**16

Fingerprint = int | tuple[torch.Tensor, ...]


def fingerprint_of(tensor: torch.Tensor) -> Fingerprint:
    """A number on the CPU, which keeps no tensor; elsewhere sums of bytes, read as integers that wrap around.

    Equal for equal contents: those of what a tensor wraps (a shard), which has the memory. Takes one read of the
    tensor, a copy of it where it is not one dense block, and at most 8 KiB beside it: on the CPU for large ones only,
    and while they are read.
    """
    prints = [_fingerprint_of_plain(part) for part in plain_tensors(tensor)]
    if len(prints) == 1:
        return prints[0]
    numbers = [item for item in prints if isinstance(item, int)]
    sums = [item for parts in prints if isinstance(parts, tuple) for item in parts]
    return (torch.tensor(numbers), *sums) if sums else hash(tuple(numbers))


def _fingerprint_of_plain(tensor: torch.Tensor) -> Fingerprint:
    value = tensor.detach()
    if not _is_dense(value) or value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg().contiguous()
    size = value.numel() * value.element_size()
    if not size:
        return 0
    on_cpu = value.device.type == "cpu"
    if on_cpu and size <= _IN_PLACE:
        return _number(value, 0, size)
    if value.storage_offset() * value.element_size() % _WORD:
        value = value.clone(memory_format=torch.preserve_format)
    flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
    whole = size // (_WORD * _COLUMNS) * _WORD * _COLUMNS
    sums = [flat[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0)] if whole else []
    if on_cpu:
        return hash((_number(flat, whole, size), *(_number(item, 0, item.nbytes) for item in sums)))
    return (flat[whole:].clone(), *sums)


def same_fingerprint(first: Fingerprint, second: Fingerprint) -> bool:
    """Whether two fingerprints of tensors of one shape are equal."""
    if isinstance(first, int) or isinstance(second, int):
        return first == second
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _number(value: torch.Tensor, begin: int, end: int) -> int:
    """A hash of a dense tensor's bytes from one place to another, read where they lie."""
    memory = (ctypes.c_ubyte * (end - begin)).from_address(value.data_ptr() + begin)
    return int.from_bytes(hashlib.blake2b(memory, digest_size=8).digest(), "little")


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill one block, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
