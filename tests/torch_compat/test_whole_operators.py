"""Operators that torch writes out before autograd: whole within the block, and as ever after it."""

import pytest
import torch
import torch.nn.functional as F

from memopt.torch_compat.aot_autograd import aot_autograd
from memopt.torch_compat.boxed import boxed
from memopt.torch_compat.whole_operators import whole_operators

IMAGE, ROWS = torch.randn(2, 3, 6, 6), torch.randn(4, 5)
CALLS = {
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "nearest-exact": (lambda x: F.interpolate(x, scale_factor=1.5, mode="nearest-exact"), IMAGE),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE),
    "corners": (lambda x: F.interpolate(x, (7, 9), mode="bilinear", align_corners=True), IMAGE),
    "bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE),
    "antialias": (lambda x: F.interpolate(x, (4, 3), mode="bilinear", antialias=True), IMAGE),
    "line": (lambda x: F.interpolate(x[0], 9, mode="linear"), IMAGE),
    "volume": (lambda x: F.interpolate(x[None], scale_factor=2, mode="trilinear"), IMAGE),
    "margin": (lambda x: F.multi_margin_loss(x, torch.arange(4)), ROWS),
    "shrink": (lambda x: F.softshrink(x, 0.1), ROWS),
}


def calls_of(function, x, dynamic=None):
    """What forward and backward call, and both results."""
    names = []

    def compiler(module, inputs):
        names.append([str(n.target) for n in module.graph.nodes if n.op == "call_function"])
        return boxed(lambda values: module(*values))

    def lower(module, inputs):
        with whole_operators(inputs):
            return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)(module, inputs)

    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    result = torch.compile(function, backend=lower, dynamic=dynamic)(leaf)
    return names, result, torch.autograd.grad(result.sin().sum(), leaf)[0]


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_calls_the_kernels_of_eager(name):
    function, x = CALLS[name]
    (forward, backward), result, gradient = calls_of(function, x)
    leaf = x.clone().requires_grad_()
    wanted = function(leaf)
    assert torch.equal(result, wanted)
    assert torch.equal(gradient, torch.autograd.grad(wanted.sin().sum(), leaf)[0])
    assert not any("_unsafe_index" in each or "gather" in each for each in forward + backward)
    assert any(each.endswith("_backward.default") for each in backward)


def test_sizes_that_are_symbols_are_traced_as_ever():
    function = lambda x: F.interpolate(x, size=(x.shape[2] * 2, 7), mode="bilinear")  # noqa: E731
    (forward, _), result, _ = calls_of(function, IMAGE, dynamic=True)
    assert any("_unsafe_index" in each for each in forward)
    torch.testing.assert_close(result, function(IMAGE))


def test_after_an_error_all_is_as_before():
    operator = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(operator.py_kernels)
    with pytest.raises(ValueError, match="no graph"), whole_operators([IMAGE]):
        assert len(operator.py_kernels) < len(before)
        raise ValueError("no graph")
    assert operator.py_kernels == before
