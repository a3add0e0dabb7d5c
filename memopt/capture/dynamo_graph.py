"""What the nodes of Dynamo's graphs are: torch functions, methods and Python operators, not yet ATen operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.torch_compat import pytree
from memopt.torch_compat.dispatch import is_wrapper
from memopt.torch_compat.operators import OpOverload, schema_of
from memopt.torch_compat.storages import storage_id

_PYTHON_WRITES = frozenset({
    "setitem", "delitem", "iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift",
    "isub", "itruediv", "ixor",
})  # fmt: skip


def value_of(node: fx.Node) -> Any:
    """The node's value on fake tensors as Dynamo left it: after all that the graph writes; None where it has none."""
    return node.meta.get("example_value")


def storages_of(node: fx.Node) -> frozenset[int]:
    """Keys of the memory that the node's tensors show; empty where one of them has no memory that it shows."""
    tensors = [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, torch.Tensor)]
    if any(tensor.layout is not torch.strided or is_wrapper(tensor) for tensor in tensors):
        return frozenset()
    try:
        return frozenset(storage_id(tensor) for tensor in tensors)
    except NotImplementedError:  # within torch.vmap
        return frozenset()


def name_of(node: fx.Node) -> str:
    """What the node calls, without its module: "mul_", "setitem", "relu"."""
    target = node.target
    if isinstance(target, OpOverload):
        return schema_of(target).name.split("::")[-1]
    return target.split(".")[-1] if isinstance(target, str) else str(getattr(target, "__name__", target))


def writes(node: fx.Node) -> bool:
    """Whether the node may write to one of its operands, by its name and its arguments."""
    name = name_of(node)
    inplace = name.endswith("_") and not name.endswith("__")
    if isinstance(node.target, OpOverload):
        inplace = schema_of(node.target).is_mutable
    return inplace or name in _PYTHON_WRITES or node.kwargs.get("out") is not None or bool(node.kwargs.get("inplace"))
