"""What autograd's graph keeps for backward, read without running anybody's hooks; tried on torch 2.11 and 2.13."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

_RAW = "_raw_saved_"


def saved_behind(nodes: Iterable[Any], most: int = 100_000) -> Iterator[torch.Tensor]:
    """The tensors that these nodes of autograd's graph, and those behind them, have saved and not released.

    What hooks have packed is looked through for tensors, and not unpacked: that may copy, or run a model. Where torch
    does not show what is saved but by unpacking it, nothing is found.

    Args:
        nodes: of the graph; the same node may be among them several times.
        most: nodes that are looked at.
    """
    waiting, seen = list(nodes), set[Any]()
    while waiting and len(seen) < most:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
        kind = type(node)
        if kind not in _names:
            _names[kind] = [name for name in dir(kind) if name.startswith(_RAW)]
        for name in _names[kind]:
            try:
                found = getattr(node, name)
                values = [item.data for item in (found if isinstance(found, (list, tuple)) else (found,))]
            except (RuntimeError, AttributeError):  # released, or of a torch that does not show it
                continue
            yield from (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))


_names: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()  # by kind of node
