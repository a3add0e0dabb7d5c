"""Operators that compute each element by itself, as JAX functions."""

import pytest
import torch
from torch.nn import functional

from tests.xla.test_lower import of

X, Y = torch.tensor([-7.5, -2.0, -0.25, 0.0, 0.75, 3.0, 9.5]), torch.tensor([2.0, -3.0, 0.5, 4.0, -0.5, 7.0, 3.0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.add(x, y, alpha=3) + torch.sub(x, y, alpha=-2) + torch.rsub(x, 5, alpha=2),
        lambda x, y: torch.div(x, y, rounding_mode="floor") + torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.div(x.long(), y.long().abs() + 1, rounding_mode="floor"),
        lambda x, y: x.long() / 4,
        lambda x, y: x.pow(3) + x.abs().pow(0.5) + torch.pow(2, y),
        lambda x, y: x.clamp(-1, 2) + x.clamp_min(y) + x.clamp_max(0.5),
        lambda x, y: torch.where(x > y, x, 2) + x.masked_fill(y < 0, -4.0),
        lambda x, y: functional.gelu(x) + functional.gelu(y, approximate="tanh") + functional.silu(x),
        lambda x, y: functional.hardsigmoid(x) + functional.hardswish(y),
        lambda x, y: x.to(torch.float16).double() + x.bool() + y.to(torch.int32),
    ],
    ids=["sums", "quotients", "whole", "floats", "powers", "clamps", "chosen", "smooth", "hard", "casts"],
)
def test_they_have_torch_s_values_and_types(function):
    (found,) = of(function, X, Y)
    torch.testing.assert_close(found, function(X, Y), rtol=1e-6, atol=1e-6)


def test_a_gradient_passes_above_the_threshold_alone():
    (found,) = of(lambda g, x: torch.ops.aten.threshold_backward(g, x, 0.75), Y, X)
    assert found.tolist() == [0, 0, 0, 0, 0, 7, 3]
