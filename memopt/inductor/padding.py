"""Padding that takes no memory of its own in Inductor's code."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memopt.inductor.kinds import is_inlined
from memopt.torch_compat.inductor_settings import longest_unpadded_row, pads_in_place, rows_begin_at

aten = torch.ops.aten


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
