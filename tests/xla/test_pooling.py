"""Windows pooled, and their gradients, as JAX functions."""

import pytest
import torch
from torch.nn import functional

from tests.xla.test_lower import of

X = torch.randn(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.max_pool2d(x, 3, 2, 1),
        lambda x: functional.max_pool2d(x, (2, 3), stride=2, ceil_mode=True),
        lambda x: functional.max_pool2d(x, 2, 1, dilation=2),
        lambda x: functional.max_pool2d(x, 3, 2, 1, return_indices=True)[1],
        lambda x: functional.avg_pool2d(x, 3, 2, 1),
        lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False, ceil_mode=True),
        lambda x: functional.avg_pool2d(x, 2, divisor_override=3),
        lambda x: functional.adaptive_avg_pool2d(x, 1),
        lambda x: functional.adaptive_avg_pool2d(x, (3, 7)),
    ],
)
def test_they_are_those_of_torch(function):
    (found,) = of(function, X)
    torch.testing.assert_close(found, function(X), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("padded", [True, False])
def test_gradients_go_where_the_values_came_from(padded):
    values, places = torch.ops.aten.max_pool2d_with_indices(X, [3, 3], [2, 2], [1, 1])

    def backward(gradient, x, places):
        greatest = torch.ops.aten.max_pool2d_with_indices_backward(
            gradient, x, [3, 3], [2, 2], [1, 1], [1, 1], False, places
        )
        mean = torch.ops.aten.avg_pool2d_backward(gradient, x, [3, 3], [2, 2], [1, 1], False, padded, None)
        return greatest, mean

    for found, expected in zip(of(backward, values, X, places), backward(values, X, places), strict=True):
        torch.testing.assert_close(found, expected)
