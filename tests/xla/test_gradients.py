"""Lowerings of gradients that differ from PyTorch's own way of computing them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.nn import functional as F

jax = pytest.importorskip("jax")
if importlib.util.find_spec("torchax") is None:
    pytest.skip("needs torchax", allow_module_level=True)

from memopt.capture.export import from_module  # noqa: E402
from memopt.xla.lower import lower, precision  # noqa: E402
from tests.xla.test_lower import Function, to_jax, to_torch  # noqa: E402

aten = torch.ops.aten


def on(platform: str, function: Any, *given: torch.Tensor) -> torch.Tensor:
    """What the function's lowering for a platform gives on this machine."""
    lowered = lower(from_module(Function(function), given), platform=platform)
    with precision(lowered.x64):
        return to_torch(jax.jit(lowered.function)(*(to_jax(value) for value in given))[0])


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (3, 6, 2, 4)])
def test_a_loss_by_class(shape: tuple[int, ...], weighted: bool, reduction: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).log_softmax(1 if len(shape) > 1 else 0)
    target = torch.randint(0, 6, (shape[0], *shape[2:]) if len(shape) > 1 else ())
    if target.ndim:
        target.view(-1)[1] = 4
        target.view(-1)[0] = -100
    weight = torch.rand(6) if weighted else None
    forward, backward = (
        (aten.nll_loss2d_forward, aten.nll_loss2d_backward)
        if x.ndim == 4
        else (aten.nll_loss_forward, aten.nll_loss_backward)
    )
    loss, total = forward(x, target, weight, reduction, -100)
    gradient = torch.randn_like(loss)

    def function(gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, total: torch.Tensor, *rest: Any) -> Any:
        return backward(gradient, x, target, rest[0] if rest else None, reduction, -100, total)

    given = (gradient, x, target, total, *(() if weight is None else (weight,)))
    torch.testing.assert_close(on("cpu", function, *given), function(*given))


@pytest.mark.quick("*-cpu")
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [
        ((3, 3), (2, 2), (1, 1), (1, 1), False), ((3, 2), (2, 1), (1, 0), (2, 3), True),
        ((2, 2), (), (0, 0), (1, 1), True), ((2, 3), (4, 5), (1, 1), (1, 1), True),
        ((7, 7), (1, 1), (3, 3), (1, 1), False),
    ],
)  # fmt: skip
def test_max_pooling(platform: str, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 4, (2, 3, 11, 13)).float()  # with equals: the first of them has the gradient
    pooled, places = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
    gradient = torch.randn_like(pooled)

    def function(gradient: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> Any:
        return aten.max_pool2d_with_indices_backward(gradient, x, kernel, stride, padding, dilation, ceil, places)

    torch.testing.assert_close(on(platform, function, gradient, x, places), function(gradient, x, places))
    single = gradient[0], x[0], places[0]
    torch.testing.assert_close(on(platform, function, *single), function(*single))
    half, wide = gradient.bfloat16(), gradient.bfloat16().double()
    exact = function(wide, x.double(), places)
    ours = (on(platform, function, half, x.bfloat16(), places).double() - exact).abs().max()
    assert ours <= torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_an_element_in_each_window_of_a_large_kernel_is_scattered_to() -> None:
    x = torch.randn(1, 1, 12, 12)
    pooled, places = F.max_pool2d(x, 10, 1, return_indices=True)

    def function(gradient: torch.Tensor, x: torch.Tensor, places: torch.Tensor) -> Any:
        return aten.max_pool2d_with_indices_backward(gradient, x, (10, 10), (1, 1), (0, 0), (1, 1), False, places)

    torch.testing.assert_close(on("cuda", function, pooled, x, places), function(pooled, x, places))
