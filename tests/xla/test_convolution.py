"""Convolutions and their gradients, as JAX functions."""

import pytest
import torch

from tests.xla.test_lower import of

aten = torch.ops.aten
PLAIN = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def data(shape, weight):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator), torch.randn(weight, generator=generator)


@pytest.mark.parametrize(
    ("shape", "weight", "how"),
    [
        ((2, 4, 9, 7), (6, 4, 3, 3), PLAIN),
        ((2, 4, 9, 7), (6, 4, 3, 2), ([2, 1], [1, 0], [1, 2], False, [0, 0], 1)),
        ((2, 4, 9, 7), (6, 2, 3, 3), ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)),
        ((2, 4, 5, 5), (4, 6, 3, 3), ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)),
        ((2, 4, 5, 5), (4, 3, 3, 3), ([2, 2], [1, 1], [1, 1], True, [0, 0], 2)),
        ((2, 3, 8), (5, 3, 3), ([1], [1], [1], False, [0], 1)),
    ],
)
def test_results_and_gradients_are_torch_s(shape, weight, how):
    x, w = data(shape, weight)
    bias = torch.arange(float(w.shape[1] * how[-1] if how[3] else w.shape[0]))
    expected = aten.convolution(x, w, bias, *how)
    (found,) = of(lambda x, w, b: aten.convolution(x, w, b, *how), x, w, bias)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)

    def backward(gradient, x, w):
        return aten.convolution_backward(gradient, x, w, [bias.numel()], *how, [True, True, True])

    gradient = torch.ones_like(expected) + expected.cos()
    for found, wanted in zip(of(backward, gradient, x, w), backward(gradient, x, w), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_gradient_that_is_not_asked_for_is_not_made():
    x, w = data((1, 2, 4, 4), (3, 2, 3, 3))
    gradient = torch.ones(1, 3, 2, 2)

    def of_weight(gradient, x, w):
        return aten.convolution_backward(gradient, x, w, [3], *PLAIN, [False, True, False])[1]

    (found,) = of(of_weight, gradient, x, w)
    torch.testing.assert_close(found, of_weight(gradient, x, w))


def test_one_image_without_a_batch():
    x, w = data((3, 6, 6), (2, 3, 3, 3))
    (found,) = of(lambda x, w: torch.nn.functional.conv2d(x, w), x, w)
    torch.testing.assert_close(found, torch.nn.functional.conv2d(x, w), rtol=1e-4, atol=1e-4)
