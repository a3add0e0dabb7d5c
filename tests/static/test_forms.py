"""Recipes compute what their operators do, into memory that they are given; the table agrees with reality."""

import pytest
import torch
import torch.nn.functional as F

from memopt.backends.static import StaticBackend
from memopt.memory.buffers import Home
from memopt.static.forms import write_of
from memopt.static.write import out_overload, table
from tests.out_overloads import examine_all
from tests.passes.build import trace
from tests.support import allocations

aten = torch.ops.aten
last = {"memory_format": torch.channels_last}


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def check(function, *tensors, homes=(Home.ARENA, Home.OUTPUT), tolerance=1e-10):
    """Run in the arena: the numbers of the operators themselves, nothing allocated but results."""
    program = trace(function, *tensors)
    bound = StaticBackend().bind(program)
    expected = program.run(*tensors)
    bound(list(tensors))
    found = bound(list(tensors))
    for a, b in zip(found, expected, strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert {block.home for block in bound.plan.blocks} <= set(homes)
    if Home.OPERATOR not in homes:
        made = [size for size in allocations(lambda: bound(list(tensors))) if size > 0]
        assert sum(made) == bound.plan.output_bytes
    return bound


CONVOLUTIONS = [
    ((2, 6, 9, 8), (4, 6, 3, 3), {"padding": 1}),
    ((2, 6, 9, 8), (4, 6, 3, 3), {"stride": 2}),
    ((2, 6, 9, 8), (4, 6, 3, 2), {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2)}),
    ((1, 6, 9, 8), (4, 6, 1, 1), {}),
    ((2, 6, 9, 8), (4, 6, 1, 1), {"stride": 2}),
    ((2, 6, 9, 8), (4, 6, 1, 1), {"padding": 1}),
    ((2, 6, 9, 8), (4, 3, 3, 3), {"padding": 1, "groups": 2}),
    ((2, 6, 9, 8), (6, 1, 5, 5), {"padding": 2, "groups": 6}),
    ((2, 6, 9, 8), (12, 1, 3, 3), {"padding": 3, "groups": 6, "stride": 2, "dilation": 2}),
    ((2, 6, 2, 2), (4, 6, 5, 5), {"padding": 4}),
    ((2, 3, 70, 70), (8, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((1, 64, 40, 40), (8, 64, 3, 3), {"padding": 1}),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("x", "w", "options"), CONVOLUTIONS)
def test_convolution(x, w, options, bias):
    b = randn(w[0]) if bias else None
    tensors = (randn(*x), randn(*w), b) if bias else (randn(*x), randn(*w))
    check(lambda *t: (F.conv2d(*t, **options) * 2,), *tensors)


@pytest.mark.parametrize(("x", "w", "options"), CONVOLUTIONS[:6])
def test_convolution_channels_last(x, w, options):
    check(lambda *t: (F.conv2d(*t, **options) * 2,), randn(*x).to(**last), randn(*w).to(**last))
    check(lambda *t: (F.conv2d(*t, **options) * 2,), randn(*x).to(**last), randn(*w))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("x", "w", "options"),
    [
        ((2, 6, 5, 4), (6, 3, 2, 2), {"stride": 2}),
        ((2, 6, 5, 4), (6, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((2, 6, 5, 4), (6, 2, 3, 4), {"stride": (1, 3), "padding": (2, 1), "dilation": (2, 1), "groups": 2}),
        ((1, 64, 40, 40), (64, 8, 2, 2), {"stride": 2}),
    ],
)
def test_transposed_convolution(x, w, options, bias):
    outputs = w[1] * options.get("groups", 1)
    tensors = (randn(*x), randn(*w), randn(outputs)) if bias else (randn(*x), randn(*w))
    check(lambda *t: (F.conv_transpose2d(*t, **options) * 2,), *tensors)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build has no oneDNN")
@pytest.mark.parametrize("attr", ["none", "relu", "hardswish", "hardsigmoid", "swish", "sigmoid", "tanh"])
def test_convolution_with_an_activation(attr):
    fused = torch.ops.mkldnn._convolution_pointwise.default
    x, w, b = torch.randn(2, 6, 9, 8).to(**last), torch.randn(4, 6, 3, 3).to(**last), torch.randn(4)
    check(lambda x, w, b: (fused(x, w, b, [1, 1], [2, 2], [1, 1], 1, attr, [], "") * 2,), x, w, b, tolerance=1e-5)


def test_transposed_convolution_channels_last():
    x, w = randn(2, 6, 5, 4).to(**last), randn(6, 3, 3, 3).to(**last)
    check(lambda x, w: (F.conv_transpose2d(x, w, stride=2, padding=1) * 2,), x, w)


def test_convolution_1d():
    check(lambda x, w, b: (F.conv1d(x, w, b, 2, 3, 2) * 2,), randn(2, 6, 20), randn(4, 6, 3), randn(4))
    check(lambda x, w: (F.conv1d(x, w, padding=1, groups=6) * 2,), randn(2, 6, 20), randn(6, 1, 3))


def test_convolution_3d_is_left_to_its_operator():
    check(lambda x, w: (F.conv3d(x, w) * 2,), randn(1, 2, 4, 4, 4), randn(3, 2, 2, 2, 2), homes=tuple(Home))


def test_norms():
    x, w, b = randn(3, 5, 8), randn(8), randn(8)
    check(lambda x, w, b: (F.layer_norm(x, (8,), w, b).exp(),), x, w, b)
    check(lambda x: (F.layer_norm(x, (5, 8)).exp(),), x)
    check(lambda x: aten.native_layer_norm(x, [8], None, None, 1e-5), x)
    image = randn(2, 8, 3, 3)
    check(lambda x, w, b: (F.group_norm(x, 4, w, b).exp(),), image, w, b)
    check(lambda x: (F.group_norm(x, 2).exp(),), image)
    statistics = randn(8), randn(8).abs() + 0.1
    norm = aten._native_batch_norm_legit_no_training
    for x in (image, image.to(**last)):
        check(lambda x, m, v, w, b: (norm(x, w, b, m, v, 0.1, 1e-3)[0].exp(),), x, *statistics, w, b)
        check(lambda x, m, v: (norm(x, None, None, m, v, 0.1, 1e-3)[0].exp(),), x, *statistics)
        check(lambda x, m, v, w: (norm(x, w, None, m, v, 0.1, 1e-3)[0].exp(),), x, *statistics, w)


@pytest.mark.parametrize("length", [5, 70])
def test_attention(length):
    def make(*shape):
        return torch.randn(shape)

    q, k, v = (make(2, length, 3, 16).transpose(1, 2) for _ in range(3))

    def attend(q, k, v, *mask, **options):
        op = aten._scaled_dot_product_flash_attention_for_cpu
        return (op(q, k, v, 0.0, options.pop("causal", False), attn_mask=mask[0] if mask else None, **options)[0] * 2,)

    for options in ({}, {"causal": True}, {"scale": 0.3}):
        check(lambda *t, options=options: attend(*t, **options), q, k, v, tolerance=1e-5)
    check(attend, q, k, v, make(length, length), tolerance=1e-5)
    check(attend, q, k, v, make(2, 1, length, length), tolerance=1e-5)
    check(attend, q, make(2, 3, 9, 16), make(2, 3, 9, 16), tolerance=1e-5)


def test_long_attention_goes_tile_by_tile():
    q, k, v = (torch.randn(1, 8, 300, 8) for _ in range(3))
    op = aten._scaled_dot_product_flash_attention_for_cpu
    bound = check(lambda q, k, v: (op(q, k, v, 0.0, True)[0] * 2,), q, k, v, tolerance=1e-5)
    scratch = [block.nbytes for block in bound.plan.blocks if block.scratch]
    assert scratch and scratch[0] < 8 * 300 * 300 * 4


def test_attention_whose_sums_are_read_is_left_to_its_operator():
    op = aten._scaled_dot_product_flash_attention_for_cpu
    check(lambda q: op(q, q, q)[:2], torch.randn(1, 2, 4, 8), homes=tuple(Home), tolerance=1e-5)


def test_softmax_of_nothing_but_minus_infinity():
    x = randn(3, 4)
    x[1] = -torch.inf
    x[2, 0] = torch.nan
    check(lambda x: (aten._safe_softmax(x, -1) * 2,), x)
    check(lambda x: (aten._safe_softmax(x, 0) * 2,), x)


def test_pools():
    x = randn(2, 3, 8, 8)
    check(lambda x: (F.max_pool2d(x.exp(), 2).sin(), F.avg_pool2d(x, 3, 2, 1).sin()), x)
    check(lambda x: (torch.cat((F.max_pool2d(x.exp(), 2), F.avg_pool2d(x, 2)), 1).sin(),), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: (x.clone() * 2, x.to(torch.float32) * 2, x.relu() * 2),
        lambda x, i: (torch.zeros_like(x) + x, torch.full((3,), 2.5, dtype=x.dtype) * 2, x.new_full((2,), 7) * 2),
        lambda x, i: (torch.arange(4.0, dtype=x.dtype) * 2, 3 - x, aten.rsub(x, x, alpha=2) * 2),
        lambda x, i: (x.mean(0) * 2, x.mean() * 2, x.mean((0, 1), keepdim=True) * 2, x.sum() * 2),
        lambda x, i: (F.embedding(i, x) * 2, F.pad(x, (1, 2, 0, 1), value=3.0) * 2, x.repeat(2, 1, 3) * 2),
        lambda x, i: (x.t().repeat(2, 3) * 2, x.masked_fill(x > 0, -1) * 2, aten.fill(x, 3) * 2),
        lambda x, i: (aten.select_scatter(x, x[0], 0, 1) * 2, aten.slice_scatter(x, x[:, :2], 1, 1, 3) * 2),
        lambda x, i: (x + 1, x * 0.5, x > 0.25, x == 1, x.pow(2), x / 3, i + 2, i * 3, x.clamp(-1, 1)),
        lambda x, i: (torch.cat((x, x.exp(), x.new_zeros(0)), 0) * 2, torch.stack((x, x.exp())) * 2),
        lambda x, i: (x.exp().t() @ x, torch.addmm(x[0, :4], x.t(), x).exp(), x.softmax(0) * 2),
        lambda x, i: (*x.topk(2), *x.sort(stable=True), *x.max(1)),
        lambda x, i: (x.exp().unbind(0)[1].sin(), x.exp().split(2)[0].sin(), x.sin().unflatten(1, (2, 2)).exp()),
    ],
)
def test_small_operators(function):
    check(function, randn(6, 4), torch.tensor([[0, 2], [5, 1]]), homes=tuple(Home))


def test_in_place_where_annotated():
    from memopt.passes.inplace import Inplace

    program = trace(lambda x: (x.exp().relu().mul(2).masked_fill(x > 0, 3).sub(1).sum(),), randn(4, 4))
    program = Inplace().run(program).program
    x = randn(4, 4)
    bound = StaticBackend().bind(program)
    torch.testing.assert_close(bound([x]), program.run(x))
    assert len([block for block in bound.plan.blocks if block.name == "exp"]) == 1
    assert not any(block.name in ("relu", "mul", "sub") for block in bound.plan.blocks)


def test_random_operators_are_never_redirected():
    program = trace(lambda x: (torch.ops.aten.rand_like(x), torch.ops.aten.native_dropout(x, 0.5, True)[0]), randn(4))
    assert all(write_of(node) is None for node in program.calls)


def test_the_table_was_made_with_this_build():
    assert table()["aten.add.out"] == {"kind": "true", "slices": True}
    assert table()["aten.relu.out"]["kind"] == "copies"
    assert out_overload(aten.add.Tensor) is aten.add.out
    assert out_overload(aten.unbind.int) is None


@pytest.mark.filterwarnings("ignore")  # PyTorch's own samples warn of what they exercise
@pytest.mark.parametrize("names", ["nn.functional.hardswish", "addmm", "softmax", "max_pool2d"])
def test_the_table_agrees_with_reality(names):
    found = examine_all(names)
    assert found
    true = {name for name, entry in found.items() if entry["kind"] == "true"}
    assert true == {name for name in found if table()[name]["kind"] == "true"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_whole_table_agrees_with_reality():
    found = examine_all()
    other = {name for name, entry in found.items() if name in table() and entry["kind"] != table()[name]["kind"]}
    assert not other, "run `python -m tests.out_overloads --write`"
