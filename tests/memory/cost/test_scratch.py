"""Estimates of what an operator takes: its results by storage, and the workspace of those known to need much."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.memory.cost.scratch import output_bytes, workspace_bytes
from memopt.program import Program
from tests.passes.build import trace

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


def node(program: Program, name: str) -> fx.Node:
    (found,) = [node for node in program.calls if name in str(node.target) and "getitem" not in str(node.target)]
    return found


def test_results_count_by_storage_and_views_not_at_all() -> None:
    program = trace(lambda x: (torch.sort((x + 1).flatten()[5:])[0], x.expand(4, 2, 3, 8, 8)), X)
    assert output_bytes(node(program, "aten.add")) == X.nbytes
    assert output_bytes(node(program, "aten.sort")) == (X.numel() - 5) * (4 + 8)
    for view in ("aten.view", "aten.slice", "aten.expand"):
        assert output_bytes(node(program, view)) == 0


def test_results_on_cuda_are_whole_blocks() -> None:
    program = trace(lambda x: (x.sum(),), X)
    total = node(program, "aten.sum")
    assert output_bytes(total) == 4
    with FakeTensorMode():
        total.meta["val"] = torch.empty((), device="cuda")
    assert output_bytes(total) == 512


def test_convolutions_reorder_their_operands() -> None:
    weight = torch.zeros(5, 3, 3, 3)
    program = trace(lambda x, w: (F.conv2d(x, w),), X, weight)
    assert workspace_bytes(node(program, "convolution")) == X.nbytes + weight.nbytes


def test_sorting_keeps_a_second_copy() -> None:
    sort = node(trace(lambda x: (torch.sort(x)[0],), X), "aten.sort")
    assert workspace_bytes(sort) == output_bytes(sort) == X.numel() * 12


def test_the_backward_of_attention_accumulates_the_query_s_gradient() -> None:
    query = torch.randn(1, 2, 16, 8)

    def function(q, k, v):
        aten = torch.ops.aten
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(out, q, k, v, out, lse, 0.0, False)

    program = trace(function, query, query + 1, query + 2)
    assert workspace_bytes(node(program, "backward")) == query.nbytes
    forward = [n for n in program.calls if "attention" in str(n.target) and "backward" not in str(n.target)]
    assert [workspace_bytes(n) for n in forward] == [0]


@pytest.mark.parametrize("function", [torch.sin, lambda x: x @ x, lambda x: x.softmax(-1), lambda x: x.t()])
def test_others_need_none(function) -> None:
    for call in trace(lambda x: (function(x),), X[0, 0]).calls:
        assert workspace_bytes(call) == 0
