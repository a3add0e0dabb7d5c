"""Padding in Inductor's code: where there may be some, and what takes no memory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from memopt.capture.dynamo_graph import value_of
from memopt.inductor.kinds import is_inlined
from memopt.torch_compat.inductor_settings import longest_unpadded_row, pads_in_place, rows_begin_at

aten = torch.ops.aten
_ALIGNED_BYTES = 16


def product_settings(graph_module: fx.GraphModule, saved_of: Sequence[Any] = ()) -> dict[str, Any]:
    """Inductor's settings for products of a graph, of which it pads factors on GPUs where that is faster.

    Not where the graph returns rows that do not begin at multiples of 16 bytes, as logits of 50,257 words: a product
    that is returned would have rows farther apart than the model's. Nor in training where sizes are symbols:
    AOTAutograd takes the strides of what is saved so for those of one size.

    Args:
        graph_module: the graph.
        saved_of: its inputs, where what it computes of them is saved for backward.
    """
    symbolic = any(isinstance(value, torch.SymInt) for value in saved_of)
    return {} if not symbolic and _returns_aligned_rows(graph_module) else {"shape_padding": False}


def _returns_aligned_rows(graph_module: fx.GraphModule) -> bool:
    returned: Any = graph_module.graph.output_node().args[0]
    nodes = [node for node in returned if isinstance(node, fx.Node) and node.op != "placeholder"]
    values = [node.meta.get("val", value_of(node)) for node in nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1]
    rows = [value.shape[-1] * value.element_size() for value in tensors]
    return all(isinstance(size, int) and size % _ALIGNED_BYTES == 0 for size in rows)  # a symbol may be any size


def padded_in_place(node: fx.Node) -> fx.Node | None:
    """The matrix whose rows Inductor lays out so far apart that the node, which pads them on the right, lies there.

    So it is for an operand of a product on a GPU that a kernel computes, where its rows have room behind them for what
    is added: rows that are long begin at multiples of 128 bytes (Inductor's `inplace_constant_pad_nd`).
    """
    if node.target is not aten.constant_pad_nd.default or not pads_in_place():
        return None
    arguments: Any = node.args
    source, padding = arguments[:2]
    if not isinstance(source, fx.Node) or not isinstance(padding, (list, tuple)) or len(padding) != 4:
        return None
    value = source.meta["val"]
    if value.dim() != 2 or not value.is_cuda or not _is_operand(node) or not is_inlined(source):
        return None
    added, aligned = padding[1], rows_begin_at() // value.element_size()
    width, rest = int(value.shape[1]), (padding[0], *padding[2:])
    room = -width % aligned
    return source if width > longest_unpadded_row() and not any(rest) and 0 < added <= room else None


def _is_operand(node: fx.Node) -> bool:
    """Whether a product reads the node, and nothing else does."""
    return [user.target for user in node.users] in ([aten.mm.default], [aten.addmm.default])
