"""Estimates of what an operator takes: its results by storage, and the workspace of those known to need much."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import memopt
from memopt.memory.cost.measure import bytes_needed
from memopt.memory.cost.scratch import most_workspace_bytes, output_bytes, workspace_bytes
from memopt.memory.cost.table import CostTable
from memopt.program import Program
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD
from tests.memory.cost.build import call
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
    found = node(program, "convolution")
    assert workspace_bytes(found) == X.nbytes + weight.nbytes
    assert most_workspace_bytes(found) == X.nbytes + weight.nbytes + F.conv2d(X, weight).nbytes, (
        "oneDNN may, results too"
    )


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("dims", "transposed", "dilation"), [(1, 0, 1), (2, 0, 1), (2, 0, 2), (2, 1, 1), (3, 0, 1)])
def test_convolutions_that_atens_own_code_computes_unfold_their_images(dims, transposed, dilation, groups) -> None:
    channels = (8, 16 // groups) if transposed else (16, 8 // groups)
    image, weight = torch.ones(6, 8, *[6] * dims).double(), torch.ones(*channels, *[3] * dims).double()
    options = (None, [1] * dims, [1] * dims, [dilation] * dims, bool(transposed), [0] * dims, groups)

    def forward(x, w):
        return (torch.ops.aten.convolution(x, w, *options),)

    def backward(g, x, w):
        return torch.ops.aten.convolution_backward(g, x, w, None, *options[1:], [True, True, False])[:2]

    gradient = torch.ones_like(forward(image, weight)[0])
    for run, operands in ((forward, (image, weight)), (backward, (gradient, image, weight))):
        found = node(trace(run, *operands), "convolution")
        taken = memopt.measure(run, *operands).peak_bytes - output_bytes(found)
        assert taken <= most_workspace_bytes(found) + 64
        assert groups > 1 or workspace_bytes(found) <= taken


# Measured in bfloat16 on an H200 by cuDNN 9.19: input, weight, stride, padding, transposed, bytes.
MEASURED = [
    ((128, 3, 224, 224), (64, 3, 7, 7), 2, 3, False, 308332032),
    ((128, 256, 56, 56), (512, 256, 1, 1), 2, 0, False, 308281856),
    ((128, 128, 28, 28), (128, 128, 3, 3), 1, 1, False, 52428800),
    ((128, 512, 28, 28), (128, 512, 1, 1), 1, 0, False, 512),
    ((8, 64, 512, 512), (64, 64, 3, 3), 1, 1, False, 536945152),
    ((8, 1024, 64, 64), (512, 1024, 3, 3), 1, 1, False, 111149056),
    ((8, 128, 256, 256), (128, 64, 2, 2), 2, 0, True, 402719232),
]


@pytest.mark.parametrize(("image", "weight", "stride", "padding", "transposed", "measured"), MEASURED)
def test_convolutions_of_cudnn_are_near_what_was_measured(image, weight, stride, padding, transposed, measured) -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    options = (None, [stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], 1)
    call = graph.call_function(torch.ops.aten.convolution.default, (x, w, *options))
    last = graph.call_function(torch.ops.aten.convolution.default, (x, w, *options))
    with FakeTensorMode():
        x.meta["val"], w.meta["val"] = (
            torch.empty(shape, device="cuda", dtype=torch.bfloat16) for shape in (image, weight)
        )
        call.meta["val"] = torch.ops.aten.convolution.default(x.meta["val"], w.meta["val"], *options)
        assert abs(workspace_bytes(call) - measured) <= max(0.02 * measured, 512)
        x.meta["val"] = torch.empty(image, device="cuda", dtype=torch.bfloat16, memory_format=torch.channels_last)
        last.meta["val"] = call.meta["val"]
        assert workspace_bytes(last) == 0


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
    for each in trace(lambda x: (function(x),), X[0, 0]).calls:
        assert workspace_bytes(each) == 0


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_backward_through_a_recurrent_layer_and_its_run_within_a_limit(kind: Any, pieces: int) -> None:
    module, x = kind(32, 64), torch.randn(64, 16, 32)
    states = [torch.zeros(1, 16, 64) for _ in range(2 if kind is nn.LSTM else 1)]
    weights = [weight.detach() for weight in module.parameters()]
    how = module.mode, True, 1, True, False, None, pieces
    output, *others = RECURRENT(x, states, weights, *how)
    wanted = [True, *(False for _ in states), *(True for _ in weights)]
    given = [output], [0], others[len(states) :], x, states, weights, wanted
    node = call(RECURRENT_BACKWARD, *given, *how)
    estimate = workspace_bytes(node)
    assert not CostTable(limit_bytes=bytes_needed(node) + estimate // 2).cost(node).measured
    cost = CostTable().cost(node)
    assert cost.measured and 0.9 * cost.workspace_bytes <= estimate <= 2.5 * cost.workspace_bytes
