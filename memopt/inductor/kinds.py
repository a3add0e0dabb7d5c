"""How Inductor runs an operation: inside the kernels of its readers, as a kernel of its own making, or by a library."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from memopt.memory.cost.roofline import is_light
from memopt.program import is_any_view, is_effectful, is_random, tensors_of
from memopt.torch_compat.inductor_compile import adds_one_by_one

aten, prims = torch.ops.aten, torch.ops.prims

# Random numbers, and the seed that they are drawn from: the same ones each time, for the same seed.
DRAWING, SEED = prims.inductor_random.default, prims.inductor_lookup_seed.default
# Computed element by element, though torch does not call them pointwise.
_INLINED = {
    aten.gather.default, aten.index.Tensor, aten.embedding.default, aten.constant_pad_nd.default,
    aten.slice_scatter.default, aten.select_scatter.default, aten.flip.default, prims.iota.default,
    SEED, DRAWING,
}  # fmt: skip
# Only moves bytes, and yet no kernel of Inductor's does.
_COPIED = {aten.slice_copy.Tensor}
# One kernel each, whose operands may be computed inside it.
REDUCTIONS = {
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default,
    aten.var.correction, aten.var_mean.correction, aten.prod.default, aten.prod.dim_int, aten.any.default,
    aten.any.dim, aten.argmax.default, aten.argmin.default, aten.logsumexp.default,
}  # fmt: skip
_MOST_CAT_OPERANDS = 8
# Added to by atomic operations; run by itself, each sorts first, and took up to 70 times as long on an H100.
_SCATTERS = {
    aten.index_put.default, aten._unsafe_index_put.default, aten._unsafe_masked_index_put_accumulate.default,
    aten.scatter_add.default,
}  # fmt: skip


def is_inlined(node: fx.Node) -> bool:
    """Whether Inductor can compute the node inside the kernel of its reader."""
    if is_random(node) or is_effectful(node) or is_any_view(node):
        return False
    tensor = node.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    return _is_light(node) or node.target in _INLINED or _is_pointwise_cat(node)


def _is_light(node: fx.Node) -> bool:
    return is_light(node) and node.target not in _COPIED


def _is_pointwise_cat(node: fx.Node) -> bool:
    """Whether a concatenation is computed element by element: on a GPU, of few tensors, for kernels that read it so.

    Else every operand is in memory, and is copied, before or as part of the result.
    """
    if node.target is not aten.cat.default or tensors_of(node)[0].device.type == "cpu":
        return False
    operands: Any = node.args[0]
    few = len(operands) <= _MOST_CAT_OPERANDS
    return few and all(_is_light(user) or user.target is aten.constant_pad_nd.default for user in node.users)


def is_generated(node: fx.Node) -> bool:
    """Whether Inductor generates a kernel for the node, though nothing is computed inside it that others store.

    Run by themselves, these are decomposed, or sort what is added up.
    """
    if getattr(node.target, "namespace", "") == "prims":
        return True
    found = tensors_of(node) if node.target in _SCATTERS else []
    return bool(found) and not adds_one_by_one(found[0].dtype)


def is_library_call(node: fx.Node) -> bool:
    """Whether the node is neither computed by a kernel of Inductor's own, nor a view of something."""
    if node.op != "call_function" or node.target in REDUCTIONS or node.target is operator.getitem:
        return False
    return not is_any_view(node) and not is_inlined(node)


def kinds_of(nodes: Iterable[fx.Node]) -> tuple[dict[fx.Node, bool], dict[fx.Node, bool], set[fx.Node]]:
    """Of each node whether it is a view, of each whether it is inlined, and the library calls: each asked once."""
    view: dict[fx.Node, bool] = {}
    inlined: dict[fx.Node, bool] = {}
    calls: set[fx.Node] = set()
    for node in nodes:
        view[node] = shown = is_any_view(node)
        inlined[node] = inside = not shown and node.op == "call_function" and is_inlined(node)
        makes = not (shown or inside) and node.op == "call_function" and node.target is not operator.getitem
        if makes and node.target not in REDUCTIONS:
            calls.add(node)
    return view, inlined, calls
