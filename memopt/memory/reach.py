"""What an object leads to: an optimizer's tensors and optimizers, what a model returns; a tensor's parts."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memopt.torch_compat import pytree
from memopt.torch_compat.storages import id_of_storage

# What an optimizer is given, and what it calls: neither is its state.
_GIVEN = frozenset({"param_groups", "defaults"})
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_MOST = 1_000_000  # values looked at

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: _ROWS,
    torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS,
    torch.sparse_bsc: _COLUMNS,
}


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no storage of its own, but indices and values that have."""
    return tensor.layout in _SPARSE


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor is made of: what a subclass wraps (8-bit state, a shard), indices and values, else itself."""
    if is_sparse(tensor):
        yield from (part for name in _SPARSE[tensor.layout] for part in plain_tensors(getattr(tensor, name)()))
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) is torch.Tensor:
        yield tensor
        return
    names, _ = flatten()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):  # a shard's mesh of devices is a part, too
            yield from plain_tensors(part)


def storages_of(tensors: Iterable[torch.Tensor], *, allocated: bool = False) -> dict[int, torch.UntypedStorage]:
    """The storages of these tensors by number; none of what shows none: oneDNN's layout, some subclasses.

    Args:
        tensors: in any order; several may share a storage.
        allocated: only those that have memory now: none of a meta tensor, or of a subclass around other tensors.
    """
    found = {}
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            storage = tensor.untyped_storage()
            if not allocated or storage.data_ptr():
                found[id_of_storage(storage)] = storage
    return found


def optimizers_in(root: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that can be reached from an object through attributes, containers and closures, outermost first.

    The object itself is among them if it is one.
    """
    return [value for value in _reached(root) if isinstance(value, torch.optim.Optimizer)]


def held_tensors(root: Any) -> list[torch.Tensor]:
    """The tensors that can be reached so, without the parameters and settings that the optimizers were given."""
    return [value for value in _reached(root) if isinstance(value, torch.Tensor)]


def shown_tensors(outputs: Any) -> list[torch.Tensor]:
    """The tensors that a model returns, in order, in plain objects too: a namespace, a dataclass unknown to torch."""
    if isinstance(outputs, torch.Tensor):  # nearly always
        return [outputs]
    found: dict[int, torch.Tensor] = {}
    for leaf in pytree.tree_leaves(outputs):
        shown = held_tensors(leaf) if not isinstance(leaf, (torch.Tensor, *_NUMBERS)) else [leaf]
        found.update((id(tensor), tensor) for tensor in shown if isinstance(tensor, torch.Tensor))
    return list(found.values())


def parts(value: Any) -> list[Any]:
    """What a value holds directly: items, attributes, what a function closes over. Models and classes hold nothing."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__]
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
    if isinstance(value, (torch.Tensor, nn.Module, type, types.ModuleType)):
        return []
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    if not isinstance(value, torch.optim.Optimizer):
        return list(attributes.values())
    return [item for name, item in attributes.items() if name not in _GIVEN and not name.endswith("_hooks")]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _reached(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [root]
    for value in waiting:  # which grows as it is gone through
        if value is None or type(value) in (bool, int, float, str) or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if len(waiting) < _MOST:
            waiting.extend(parts(value))
