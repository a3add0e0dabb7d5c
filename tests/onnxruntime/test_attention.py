"""CUDA's attention kernels in a graph become the one operator that every device and the exporter know."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx

from memopt.onnxruntime.attention import plain_attention

aten = torch.ops.aten


def graph(kernel: Any, *rest: Any, read: int = 0, **more: Any) -> fx.GraphModule:
    made = fx.Graph()
    q, k, v, bias = (made.placeholder(name) for name in ("q", "k", "v", "bias"))
    node = made.call_function(kernel, (q, k, v, *(bias if item == "bias" else item for item in rest)), more)
    made.output(made.call_function(operator.getitem, (node, read)))
    return fx.GraphModule({}, made)


@pytest.mark.parametrize(
    ("kernel", "rest", "more", "masked", "causal"),
    [
        (aten._scaled_dot_product_flash_attention.default, (0.0, True), {"scale": 0.5}, False, True),
        (aten._scaled_dot_product_flash_attention.default, (), {}, False, False),
        (aten._scaled_dot_product_efficient_attention.default, ("bias", False), {}, True, False),
        (aten._scaled_dot_product_efficient_attention.default, (None, False, 0.0, True), {"scale": 0.5}, False, True),
        (aten._scaled_dot_product_cudnn_attention.default, ("bias", False, 0.0), {"scale": 0.25}, True, False),
        (aten._scaled_dot_product_cudnn_attention.default, (None, False, 0.0, True, False), {}, False, True),
        (aten._scaled_dot_product_fused_attention_overrideable.default, ("bias",), {}, True, False),
    ],
)
def test_kernels(kernel: Any, rest: Any, more: Any, masked: bool, causal: bool) -> None:
    given = graph(kernel, *rest, **more)
    before = str(given.graph)
    found = plain_attention(given)
    assert str(given.graph) == before
    assert [node.target for node in found.graph.nodes if node.op == "call_function"] == [
        aten.scaled_dot_product_attention.default
    ]
    q, k, v, bias = (torch.randn(2, 3, 5, width) for width in (4, 4, 4, 5))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, bias if masked else None, is_causal=causal, scale=more.get("scale")
    )
    torch.testing.assert_close(found(q, k, v, bias), expected)


def test_what_drops_scores_or_is_read_for_a_backward_stays() -> None:
    for given in (
        graph(aten._scaled_dot_product_flash_attention.default, 0.1),
        graph(aten._scaled_dot_product_flash_attention.default, read=1),
        graph(aten._scaled_dot_product_flash_attention_for_cpu.default),
    ):
        assert plain_attention(given) is given
