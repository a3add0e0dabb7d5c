"""Packed sequences (`torch.nn.utils.rnn`) on fake tensors: what torch's own kernels read of them stays real."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from memopt.torch_compat import pytree


def turned(make: Callable[[torch.Tensor], torch.Tensor], values: Any) -> Any:
    """The values with `make` done to their tensors; sizes of batches of packed sequences stay as they are."""

    def one(value: Any) -> Any:
        if isinstance(value, PackedSequence):
            data, sizes, *places = value
            return PackedSequence(make(data), sizes, *(None if place is None else make(place) for place in places))
        return make(value) if isinstance(value, torch.Tensor) else value

    return pytree.tree_map(one, values, is_leaf=lambda value: isinstance(value, PackedSequence))


class Unpacking(TorchFunctionMode):
    """Within: packed sequences are padded by operators that fake tensors have, as torch's own kernel does it.

    That one writes lengths into memory that fake tensors lack. Tried on torch 2.13.
    """

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch's."""
        if getattr(func, "__name__", "") == "_pad_packed_sequence" and not kwargs and len(args) == 5:
            return _padded(*args)
        return func(*args, **(kwargs or {}))


def _padded(data: torch.Tensor, sizes: torch.Tensor, first: bool, value: float, total: int) -> tuple[Any, Any]:
    batches = sizes.tolist()
    length, most = max(len(batches), total), batches[0]
    output = torch.full((length, most, *data.shape[1:]), value, dtype=data.dtype, device=data.device)
    begin = offset = 0
    for end in range(1, len(batches) + 1):
        if end == len(batches) or batches[end] != batches[begin]:
            count = (end - begin) * batches[begin]
            piece = data[offset : offset + count].view(end - begin, batches[begin], *data.shape[1:])
            output[begin:end, : batches[begin]].copy_(piece)
            begin, offset = end, offset + count
    lengths = [sum(batch > place for batch in batches) for place in range(most)]
    return output.transpose(0, 1) if first else output, torch.tensor(lengths)
