"""Whether views show an element twice, or the same elements as others of their memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from memopt.torch_compat.storages import storage_id
from memopt.torch_compat.symbols import surely

# Places looked at before two views count as showing the same element though none was found.
_PLACES = 10_000


def may_overlap(view: torch.Tensor) -> bool:
    """Whether two places of a view may be one element: a larger stride does not step over all smaller ones."""
    reach: Any = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if surely(size == 1):
            continue
        if not surely(stride > reach):
            return True
        reach += stride * (size - 1)
    return False


def same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors show the same elements of the same memory in the same order."""
    return bool(
        storage_id(one) == storage_id(other)
        and one.dtype == other.dtype
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and all(n == 1 or a == b for n, a, b in zip(one.shape, one.stride(), other.stride(), strict=True))
    )


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two strided tensors show an element in common; where that takes long to find out, they count as if.

    An element of one is at its offset plus a multiple of each stride, up to the size. Both are at the same place where
    one equation has a solution in whole numbers within these bounds, which a search finds, the largest strides first.
    """
    if storage_id(one) != storage_id(other) or not one.numel() or not other.numel():
        return False
    units = (1, 1) if one.dtype == other.dtype else (one.element_size(), other.element_size())
    counts: Counter[int] = Counter()
    # The second tensor's places counted from its last element, so that all terms have one sign.
    goal = int(other.storage_offset()) * units[1] - int(one.storage_offset()) * units[0]
    for tensor, unit in zip((one, other), units, strict=True):
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            counts[int(stride) * unit] += int(size) - 1
            goal += (int(size) - 1) * int(stride) * unit if tensor is other else 0
    if units != (1, 1):  # the bytes of an element, too
        counts[1] += sum(units) - 2
        goal += units[1] - 1
    terms = sorted(((stride, count) for stride, count in counts.items() if stride and count), reverse=True)
    reach, divisor = [0], [0]
    for stride, count in reversed(terms):
        reach.append(reach[-1] + stride * count)
        divisor.append(math.gcd(divisor[-1], stride))
    work = [(0, goal)]
    for _ in range(_PLACES):
        if not work:
            return False
        place, left = work.pop()
        after = len(terms) - place
        if left == 0:
            return True
        if not 0 < left <= reach[after] or left % divisor[after]:
            continue
        stride, count = terms[place]
        least = max(0, -((reach[after - 1] - left) // stride))
        work += [(place + 1, left - stride * times) for times in range(least, min(count, left // stride) + 1)]
    return True
