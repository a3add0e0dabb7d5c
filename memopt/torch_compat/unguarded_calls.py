"""Methods of tensors that ask the device before they call an operator, by operators alone.

Torch's Python bindings of a few methods select the device of the tensor first, a fake tensor's as well: in a process
that cannot ask CUDA they fail where the operator itself would not. Tried on torch 2.11 and 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def call_operators_alone() -> None:
    """Have those methods do without the device, for the rest of this process."""
    for name, method in (("copy_", _copied), ("nonzero", _nonzero), ("__getitem__", _part), ("__setitem__", _put)):
        setattr(torch.Tensor, name, method)


def _copied(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return aten.copy_.default(self, src, non_blocking)  # type: ignore[no-any-return]


def _nonzero(self: torch.Tensor, *, as_tuple: bool = False) -> Any:
    found = aten.nonzero.default(self)
    return found.unbind(1) if as_tuple else found


def _part(self: torch.Tensor, key: Any) -> torch.Tensor:
    """`self[key]`, as NumPy defines it."""
    view, indices = _viewed(self, key)
    return view if not indices else aten.index.Tensor(view, indices)


def _put(self: torch.Tensor, key: Any, value: Any) -> None:
    view, indices = _viewed(self, key)
    filled = value if isinstance(value, torch.Tensor) else aten.scalar_tensor.default(value, dtype=self.dtype)
    if indices:
        aten.index_put_.default(view, indices, filled.to(view.device, view.dtype))
    else:
        aten.copy_.default(view, filled)


def _viewed(tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """What of a key is a view, taken, and by dimension the indices that remain; an empty list where none does.

    Raises:
        NotImplementedError: a key of another kind: masks, lists, truth values.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    if not any(item is Ellipsis for item in keys):
        keys.append(Ellipsis)
    whole = tensor.dim() - sum(item is not None and item is not Ellipsis for item in keys)
    view, indices = tensor, list[torch.Tensor | None]()
    for item in keys:
        at = len(indices)
        if item is Ellipsis:
            indices += [None] * whole
        elif item is None:
            view = aten.unsqueeze.default(view, at)
            indices.append(None)
        elif isinstance(item, slice):
            view = aten.slice.Tensor(view, at, item.start, item.stop, 1 if item.step is None else item.step)
            indices.append(None)
        elif isinstance(item, torch.Tensor) and not item.dtype.is_floating_point and item.dtype != torch.bool:
            indices.append(item)
        elif isinstance(item, (int, torch.SymInt)) and not isinstance(item, bool):
            view = aten.select.int(view, at, item)
        else:
            raise NotImplementedError(f"a key that is a {type(item).__name__}")
    return view, indices if any(index is not None for index in indices) else []
