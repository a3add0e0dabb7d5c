"""Small results of an executable as one array: exchanging one takes the host as long as ten kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from memopt.xla.layout import Order

# Larger results are exchanged by themselves: gathering copies them.
_MOST_BYTES = 1 << 16
_ALIGNMENT = 128  # bytes; kernels read vectors, and lines of a cache


@dataclasses.dataclass(frozen=True)
class _Place:
    name: str
    like: torch.Tensor
    offset: int  # in elements


class Together:
    """Which results lie in which array, where, and as what.

    Attributes:
        names: those of the arrays, in order, behind the results that stay by themselves.
        apart: names of the results that do, in order.
    """

    def __init__(self, results: Mapping[str, Any], orders: Mapping[str, Order], wanted: Sequence[str]) -> None:
        """Lay them out.

        Args:
            results: the executable's results by name, as fake tensors.
            orders: in which order of their axes they are exchanged.
            wanted: names of those that may be gathered: nothing is to depend on which memory they are in.
        """
        self._groups: dict[torch.dtype, list[_Place]] = {}
        self._sizes: dict[torch.dtype, int] = {}
        for name in wanted:
            value = results.get(name)
            if not isinstance(value, torch.Tensor) or not 0 < value.numel() * value.element_size() <= _MOST_BYTES:
                continue
            if orders.get(name) is None and not value.is_contiguous():
                continue
            offset = self._sizes.get(value.dtype, 0)
            self._groups.setdefault(value.dtype, []).append(_Place(name, value, offset))
            step = max(1, _ALIGNMENT // value.element_size())
            self._sizes[value.dtype] = offset + math.ceil(value.numel() / step) * step
        self._groups = {dtype: places for dtype, places in self._groups.items() if len(places) > 1}
        inside = {place.name for places in self._groups.values() for place in places}
        self.apart = [name for name in results if name not in inside]
        self.names = [f"together, {dtype}" for dtype in self._groups]

    def gathered(self, function: Callable[..., list[Any]], results: Sequence[str]) -> Callable[..., list[Any]]:
        """The function, of results of these names, with some of them gathered."""

        def gather(*given: Any) -> list[Any]:
            found = dict(zip(results, function(*given), strict=True))
            return [*(found[name] for name in self.apart), *(self._joined(dtype, found) for dtype in self._groups)]

        return gather

    def _joined(self, dtype: torch.dtype, found: Mapping[str, Any]) -> Any:
        places = self._groups[dtype]
        ends = [*(place.offset for place in places[1:]), self._sizes[dtype]]
        parts = []
        for place, end in zip(places, ends, strict=True):
            flat = jnp.reshape(found[place.name], -1)
            parts.append(jnp.pad(flat, (0, end - place.offset - flat.size)))
        return jnp.concatenate(parts)

    def parted(self, arrays: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gathered results by name: tensors of their own in the memory that they share, none a view of another."""
        found = {}
        for array, places in zip(arrays, self._groups.values(), strict=True):
            for place in places:
                own = torch.empty(0, dtype=array.dtype, device=array.device)
                size, stride = place.like.shape, place.like.stride()
                found[place.name] = own.set_(array.untyped_storage(), place.offset, size, stride)
        return found
