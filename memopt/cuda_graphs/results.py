"""Large results of a captured forward, which the caller gets where they lie rather than copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from memopt.cuda_graphs.aliases import address_of

# Bytes from which a result is not copied. Smaller ones are: a loop keeps its losses, and one that is held beyond the
# next step ends the CUDA graph.
_LARGE = 2**20


def aliased_places(results: Sequence[Any], saved: Sequence[Any], own: Sequence[int]) -> list[int]:
    """Positions of the results that the caller gets where they lie.

    Args:
        results: of forward, in the CUDA graph's memory.
        saved: what forward saves.
        own: positions of those in the CUDA graph's memory. At least one must be no result: its end shows
            that autograd holds nothing any more.
    """
    large = [place for place, value in enumerate(results) if _is_large(value)]
    addresses = {address_of(results[place]) for place in large}
    return [] if own and all(address_of(saved[index]) in addresses for index in own) else large


def with_versions_of(aliased: Iterable[torch.Tensor], saved: list[Any], own: Iterable[int]) -> list[int]:
    """Give what is saved of such results their versions, so that autograd sees writes to them.

    Args:
        aliased: the results.
        saved: what is saved, changed in place.
        own: positions of those in the CUDA graph's memory.

    Returns:
        Positions of the others of these.
    """
    shown, alone = {address_of(value): value for value in aliased}, []
    for index in own:
        value = saved[index]
        result = shown.get(address_of(value))
        if result is None:
            alone.append(index)
        else:
            saved[index] = result.detach().as_strided(value.shape, value.stride(), value.storage_offset())
    return alone


def _is_large(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() >= _LARGE
