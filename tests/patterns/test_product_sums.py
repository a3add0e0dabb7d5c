"""Sums of matrix products: an operator's three forms, on tensors and on fake ones."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.memory.cost.devices import find
from memopt.memory.cost.roofline import flops, rate
from memopt.memory.over_operands import inplace_overload
from memopt.patterns.overwrites import sum_so_far
from memopt.patterns.product_sums import (
    ADD_PRODUCT,
    ADD_PRODUCT_INTO,
    ADD_PRODUCT_OVER,
    WIDE_PRODUCT,
    in_float32,
)
from memopt.program import Phase

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def operands(dtype, device="cpu"):
    torch.manual_seed(0)
    left = torch.randn(9, 5).to(device, dtype).t()  # as a gradient's factor comes
    right = torch.randn(9, 7).to(device, dtype)
    total = torch.randn(5, 7).to(device, torch.float64 if dtype is torch.float64 else torch.float32)
    return total, left, right


def check(dtype, device="cpu"):
    total, left, right = operands(dtype, device)
    exact = total.double() + left.double() @ right.double()
    before = total.clone()
    apart = ADD_PRODUCT(total, left, right)
    assert apart.dtype == total.dtype
    assert torch.equal(total, before), "the form that is functional leaves the sum as it is"
    assert (apart - exact).abs().max() <= 64 * torch.finfo(total.dtype).eps * exact.abs().max(), "no product is rounded"
    over, into = total.clone(), total.clone()
    assert ADD_PRODUCT_OVER(over, left, right) is over
    assert ADD_PRODUCT_INTO(into, left, right) is None
    assert torch.equal(over, apart) and torch.equal(into, apart)
    wide, true = WIDE_PRODUCT(left, right), left.double() @ right.double()
    assert wide.dtype is torch.float32
    assert (wide - true).abs().max() <= 64 * torch.finfo(wide.dtype).eps * exact.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_in_the_sum_s_precision(dtype):
    check(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_is_added_in_the_sum_s_precision_on_a_gpu(dtype):
    check(dtype, "cuda")
    total, left, right = (torch.zeros(2048, 512, device="cuda"), *operands(dtype, "cuda")[1:])
    if in_float32(left):
        left, right = left.new_ones(2048, 64), right.new_ones(64, 512)
        ADD_PRODUCT_OVER(total, left, right)
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        ADD_PRODUCT_OVER(total, left, right)
        assert torch.cuda.max_memory_allocated() == start, "nothing is made beside the sum"
        assert (total == 128).all()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors(device):
    with FakeTensorMode():
        left, right = (
            torch.empty(9, 5, dtype=torch.bfloat16, device=device).t(),
            torch.empty(9, 7, dtype=torch.bfloat16, device=device),
        )
        total = WIDE_PRODUCT(left, right)
        assert (total.shape, total.dtype, total.device.type) == ((5, 7), torch.float32, device)
        made = ADD_PRODUCT(total, left, right)
        assert made is not total and made.stride() == (7, 1)
        assert ADD_PRODUCT_OVER(total, left, right) is total
        with pytest.raises(RuntimeError, match="cannot be added"):
            ADD_PRODUCT(total, right, left)


def test_only_half_precision_on_a_gpu_is_multiplied_so():
    with FakeTensorMode():
        for dtype, wanted in ((torch.float16, True), (torch.float32, False), (torch.float64, False)):
            assert in_float32(torch.empty(2, 2, dtype=dtype, device="cuda")) is wanted
        assert not in_float32(torch.empty(2, 2, dtype=torch.float16))


def node_of(target, *values):
    graph = fx.Graph()
    nodes = []
    for index, value in enumerate(values):
        nodes.append(graph.placeholder(f"x{index}"))
        nodes[-1].meta["val"] = value
    node = graph.call_function(target, tuple(nodes))
    node.meta.update(val=target(*values), phase=Phase.FORWARD)
    return node


def test_its_time_is_that_of_its_factors_precision():
    node = node_of(ADD_PRODUCT, *operands(torch.bfloat16))
    assert flops(node) == 2 * 5 * 9 * 7
    assert rate(node, find("h100")) == find("h100").flops["bfloat16"]
    assert flops(node_of(WIDE_PRODUCT, *operands(torch.bfloat16)[1:])) == 2 * 5 * 9 * 7


def test_the_sum_is_written_over_where_nothing_else_reads_it():
    assert inplace_overload(ADD_PRODUCT) is ADD_PRODUCT_OVER
    node = node_of(WIDE_PRODUCT, *operands(torch.bfloat16)[1:])
    graph = node.graph
    added = graph.call_function(ADD_PRODUCT, (node, *node.args))
    added.meta["phase"] = Phase.FORWARD
    assert sum_so_far(added) is node and sum_so_far(node) is None
    added.meta["phase"] = Phase.BACKWARD  # what waits for backward may be read twice
    assert sum_so_far(added) is None
    added.meta["phase"] = Phase.FORWARD
    graph.call_function(torch.ops.aten.sum.default, (node,))
    assert sum_so_far(added) is None
    assert sum_so_far(node_of(ADD_PRODUCT, *operands(torch.bfloat16))) is None, "a sum that is given is the caller's"
