"""Attention as CUDA's kernels name it, back in the one form that the ONNX exporter translates for every device."""

from __future__ import annotations

import copy
import operator

import torch
from torch import fx

from memopt.program import argument

_ATEN = torch.ops.aten
_KERNELS = (
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_fused_attention_overrideable.default,
)


def plain_attention(module: fx.GraphModule) -> fx.GraphModule:
    """Return a graph with `scaled_dot_product_attention` for each of CUDA's attention kernels; the same where none is.

    A kernel of which more than the attention itself is read (what its backward needs) stays, as does one that drops
    scores at random.
    """
    if not any(_is_plain(node) for node in module.graph.nodes):
        return module
    made = copy.copy(module)
    made.graph = copy.deepcopy(module.graph)
    for node in list(made.graph.nodes):
        if not _is_plain(node):
            continue
        with made.graph.inserting_before(node):
            mask = argument(node, "attn_bias")
            attention = made.graph.call_function(
                _ATEN.scaled_dot_product_attention.default,
                (*node.args[:3], mask, 0.0, bool(argument(node, "is_causal"))),
                {"scale": argument(node, "scale")},
            )
        users = list(node.users)
        attention.meta["val"] = users[0].meta.get("val") if users else None
        for user in users:
            user.replace_all_uses_with(attention)
            made.graph.erase_node(user)
        made.graph.erase_node(node)
    made.recompile()
    return made


def _is_plain(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target in _KERNELS
        and not argument(node, "dropout_p")
        and all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    )
