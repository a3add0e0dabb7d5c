"""A few kilobytes that tell whether a tensor holds what it held: writes through `tensor.data` leave no other trace."""

from __future__ import annotations

import torch

# Words are summed in so many columns, so that what only changes places is seen as well; a prime, as no shape's sizes.
_COLUMNS = 1021
_WORD = 8  # bytes


def fingerprint_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of the tensor's bytes, read as integers that wrap around; equal for equal contents.

    Takes one read of the tensor, and a copy of it where it is not one dense block.
    """
    value = tensor.detach()
    if not _is_dense(value) or value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg().contiguous()
    size = value.numel() * value.element_size()
    if not size:
        return ()
    if value.storage_offset() * value.element_size() % _WORD:
        value = value.clone(memory_format=torch.preserve_format)
    flat = value.as_strided((value.numel(),), (1,)).view(torch.uint8)
    whole = size // (_WORD * _COLUMNS) * _WORD * _COLUMNS
    found = [flat[whole:].clone()]
    if whole:
        found.append(flat[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0))
    return tuple(found)


def same_fingerprint(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    """Whether two fingerprints of tensors of one shape are equal."""
    return len(first) == len(second) and all(map(torch.equal, first, second))


def _is_dense(value: torch.Tensor) -> bool:
    """Whether the elements fill one block, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
