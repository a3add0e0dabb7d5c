"""Times from arithmetic and traffic, by hand."""

import dataclasses

import pytest
import torch

from memopt.memory.cost.devices import DEVICES, Device
from memopt.memory.cost.elsewhere import moved
from memopt.memory.cost.roofline import bytes_moved, flops, is_light, makes_nothing, rate, seconds
from tests.memory.cost.build import GEOMETRY, aten, call
from tests.support import capture

X, W, Y = torch.randn(2, 16, 32, 32), torch.randn(32, 16, 3, 3), torch.randn(2, 32, 32, 32)
Q = torch.randn(2, 4, 128, 32)
DEPTHWISE = ([1, 1], [1, 1], [1, 1], False, [0, 0], 16)
ROUND = Device(
    "round", "Round", "cuda", {"float32": 1e12, "float16": 1e13, "tf32": 4e12}, 1e9, 0, 1e-6, (0.5, 0.2, 0.25)
)


def attention(causal, heads=4):
    k = Q[:, :heads].contiguous()
    return call(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, k, k, 0.0, causal)


def attention_backward(causal, heads=4):
    k = Q[:, :heads].contiguous()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu.default(Q, k, k, 0.0, causal)
    return call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, Q, Q, k, k, out, lse, 0.0, causal)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (lambda: call(aten.mm.default, torch.randn(3, 5), torch.randn(5, 7)), 2 * 3 * 5 * 7),
        (lambda: call(aten.addmm.default, torch.randn(7), torch.randn(3, 5), torch.randn(5, 7)), 2 * 3 * 5 * 7),
        (lambda: call(aten.bmm.default, torch.randn(2, 3, 5), torch.randn(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
        (lambda: call(aten.convolution.default, X, W, None, *GEOMETRY), 2 * 2 * 32 * 32 * 32 * 16 * 9),
        (
            lambda: call(aten.convolution_backward.default, Y, X, W, [32], *GEOMETRY, [True, True, False]),
            2 * 2 * 2 * 32 * 32 * 32 * 16 * 9,
        ),
        (
            lambda: call(
                aten.convolution_backward.default, X, X, W[:16, :1].contiguous(), [0], *DEPTHWISE, [True, True, False]
            ),
            2 * 2 * 2 * 32 * 32 * 16 * 9,
        ),
        (
            lambda: call(aten.convolution_backward.default, Y, X, W, [32], *GEOMETRY, [False, True, True]),
            2 * 2 * 32 * 32 * 32 * 16 * 9,
        ),
        (lambda: attention(False), 2 * 2 * 2 * 4 * 128 * 128 * 32),
        (lambda: attention(True), 2 * 2 * 4 * 128 * 128 * 32),
        (lambda: attention(True, heads=2), 2 * 2 * 4 * 128 * 128 * 32),
        (lambda: attention(True, heads=1), 2 * 2 * 4 * 128 * 128 * 32),
        (lambda: attention_backward(True), 5 * 2 * 4 * 128 * 128 * 32),
        (lambda: attention_backward(True, heads=2), 5 * 2 * 4 * 128 * 128 * 32),
        (lambda: call(aten.relu.default, X), 0),
    ],
)
def test_arithmetic(node, expected):
    assert flops(node()) == expected


def test_shapes_that_a_formula_of_torch_refuses_have_no_arithmetic():
    node = call(aten._scaled_dot_product_flash_attention_for_cpu.default, Q, Q, Q)
    node.args = (*node.args[:2], call(aten.relu.default, X))
    assert flops(node) == 0


def test_traffic():
    x = torch.randn(64, 32)
    assert bytes_moved(call(aten.relu.default, x)) == 2 * 4 * 64 * 32
    assert bytes_moved(call(aten.mul.Tensor, x, x)) == 2 * 4 * 64 * 32  # one operand
    assert bytes_moved(call(aten.mul.Tensor, x, x.clone())) == 3 * 4 * 64 * 32
    assert bytes_moved(call(aten.mul.Tensor, x[:, :1].expand(64, 32), x)) == 4 * (64 + 2 * 64 * 32)
    assert bytes_moved(call(aten.sum.default, x.as_strided((3, 16), (8, 1)))) == 4 * 32 + 4  # rows that overlap
    assert bytes_moved(call(aten.clone.default, x[:, ::2])) == 2 * 4 * 64 * 16  # no gaps
    assert bytes_moved(call(aten.full.default, [10], 1.0)) == 40
    assert bytes_moved(call(aten.sum.default, x[:0])) == 4


def test_picking_reads_what_is_picked():
    table, rows = torch.randn(1000, 16), torch.zeros(4, dtype=torch.int64)
    assert bytes_moved(call(aten.embedding.default, table, rows)) == 4 * 8 + 2 * 4 * 4 * 16
    assert bytes_moved(call(aten.index_select.default, table[:3], 0, rows)) == 4 * 8 + 4 * 3 * 16 + 4 * 4 * 16


def test_the_slower_of_the_two_and_the_launch():
    half = torch.empty(64, 64, dtype=torch.float16, device="meta")
    moved_bytes = 3 * 64 * 64 * 2
    node = call(aten.mm.default, half, half.clone())
    assert seconds(node, ROUND) == pytest.approx(1e-6 + moved_bytes / 0.25e9)
    slow = dataclasses.replace(ROUND, flops={"float32": 1.0, "float16": 1e6})
    assert seconds(node, slow) == pytest.approx(2 * 64**3 / 0.5e6)
    convolution = call(aten.convolution.default, X, W, None, *GEOMETRY)
    still = dataclasses.replace(ROUND, flops={"tf32": 1e6})
    assert seconds(convolution, still) == pytest.approx(flops(convolution) / 0.2e6)
    assert seconds(call(aten.view.default, half, [-1]), ROUND) == 0.0
    assert seconds(call(aten.empty.memory_format, [0]), ROUND) == 1e-6


def test_measured_traffic_is_interpolated():
    measured = dataclasses.replace(ROUND, traffic=((16, 1e-6), (1016, 2e-6), (2016, 4e-6)))
    assert seconds(call(aten.relu.default, torch.randn(1)), measured) == 1e-6
    assert seconds(call(aten.relu.default, torch.randn(127)), measured) == pytest.approx(2e-6)
    assert seconds(call(aten.relu.default, torch.randn(189)), measured) == pytest.approx(2e-6 + 2e-6 * 496 / 1000)
    assert seconds(call(aten.relu.default, torch.randn(504)), measured) == pytest.approx(8e-6)


def test_rates_follow_dtype_and_precision():
    h100 = DEVICES["h100"]
    square = torch.randn(8, 8)
    product = call(aten.mm.default, square, square)
    assert rate(product, h100) == 66.9e12
    assert rate(call(aten.mm.default, square.half(), square.half()), h100) == 989.4e12
    assert rate(call(aten.mm.default, square.double(), square.double()), h100) == 66.9e12
    out, sums = Q.bfloat16(), torch.zeros(2, 4, 128)
    backward = (out, out, out, out, out, sums, 0.0, True)
    assert rate(call(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, *backward), h100) == 989.4e12
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert rate(product, h100) == 989.4e12 / 2
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    # Convolutions of float32 run on tensor cores unless told otherwise.
    convolution = call(aten.convolution.default, X, W, None, *GEOMETRY)
    assert rate(convolution, h100) == 989.4e12 / 2
    assert rate(convolution, ROUND) == 4e12


def test_what_is_light():
    flat = torch.randn(64)
    for case in [
        (aten.relu.default, X),
        (aten.gelu_backward.default, X, X),
        (aten._to_copy.default, X),
        (aten.clone.default, X),
        (aten.native_dropout.default, X, 0.5, True),
        (aten.hardswish_backward.default, X, X),
        (aten.full.default, [3], 1.0),
    ]:
        node = call(*case, dtype=torch.half) if case[0] is aten._to_copy.default else call(*case)
        assert is_light(node), case[0]
    for case in [
        (aten.sum.default, X),
        (aten._softmax.default, X, 1, False),
        (aten.native_layer_norm.default, Q, [32], None, None, 1e-5),
        (aten.dot.default, flat, flat),
        (aten.cat.default, [X, X], 1),
    ]:
        assert not is_light(call(*case)), case[0]


def test_what_makes_nothing():
    assert makes_nothing(call(aten.view.default, X, [-1])) and makes_nothing(call(aten.sym_size.int, X, 0))
    assert makes_nothing(call(aten._unsafe_view.default, X, [2, -1]))
    assert not makes_nothing(call(aten.relu.default, X)) and not makes_nothing(call(aten.full.default, [3], 1.0))
    assert not makes_nothing(call(aten.clone.default, X))


def test_the_order_of_devices_on_a_real_graph():
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
    program = moved(capture(model.bfloat16(), torch.randn(4096, 512).bfloat16()), "cuda")
    totals = {name: sum(seconds(node, device) for node in program.calls) for name, device in DEVICES.items()}
    assert totals["h200"] < totals["h100"] < totals["a100"] < totals["l4"] < totals["t4"]
