"""Whether Dynamo has captured a graph that was captured before: after a guard on what the graph does not depend on.

A class of transformers that classifies notes in its first call what kind of loss it takes, and is captured anew in the
second one for that; torch.compile compiles it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.graph.fake_calls import library_settings
from memopt.torch_compat import pytree
from memopt.torch_compat.fake_tensors import FakeTensor
from memopt.torch_compat.storages import storage_id

_PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), slice, torch.dtype, torch.device, torch.layout}
    | {torch.memory_format}
)
# By which kernels attention runs, and how products are rounded.
_ATTENTION: tuple[Any, ...] = (
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
)
_PRODUCTS = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")


def description(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """All that the code of a graph depends on, in what can be compared; None where not all of it is known.

    Args:
        graph: of Dynamo's.
        inputs: that it was captured with; only how these lie matters, not what is in them.
    """
    try:
        return _settings(), _inputs(inputs), _nodes(graph)
    except _UnknownError:
        return None
    except RuntimeError:  # the old and the new way to say how products are rounded, mixed: torch tells neither
        return None


def _settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        *((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")),
        torch.is_autocast_cache_enabled(),
        library_settings(),
        *(enabled() for enabled in _ATTENTION),
        *(getattr(torch.backends.cuda.matmul, name) for name in _PRODUCTS),
        torch.backends.cudnn.allow_tf32,
    )


class _UnknownError(Exception):
    """Something that is not known to be the same when it compares as equal."""


def _inputs(inputs: Sequence[Any]) -> tuple[Any, ...]:
    found, storages = list[Any](), dict[int, int]()
    for value in inputs:
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and value.layout is torch.strided
        if not plain or not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
            raise _UnknownError
        shared = storages.setdefault(storage_id(value), len(storages))  # which of them lie in one memory
        found.append((shared, value.untyped_storage().nbytes(), value.storage_offset(), *_layout(value)))
    return tuple(found)


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    bits = value.is_conj(), value.is_neg(), value.is_inference(), value.is_leaf
    return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad, bits


def _nodes(module: fx.GraphModule) -> tuple[Any, ...]:
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    return tuple((node.op, _target(module, node), _arguments(node, place)) for node in module.graph.nodes)


def _target(module: fx.GraphModule, node: fx.Node) -> Any:
    if node.op == "placeholder":
        origin = getattr(node.meta.get("grapharg"), "source", None)
        return node.target if origin is None else origin.name
    if node.op == "get_attr":
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):  # what a checkpoint runs, say
            return _nodes(value)
        raise _UnknownError
    return node.target if node.op in ("call_function", "call_method", "output") else _unknown()


def _arguments(node: fx.Node, place: dict[fx.Node, int]) -> Any:
    def told(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return "value", place[value]
        return (type(value), repr(value)) if type(value) in _PLAIN else _unknown()

    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    return structure, tuple(map(told, leaves))


def _unknown() -> Any:
    raise _UnknownError
