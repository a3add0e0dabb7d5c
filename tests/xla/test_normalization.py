"""Normalizations and their gradients, as JAX functions."""

import pytest
import torch
from torch.nn import functional

from tests.xla.test_lower import of

aten = torch.ops.aten
X = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(0)) * 3 + 1
WEIGHT, BIAS, MEAN, VAR = torch.rand(6) + 0.5, torch.randn(6), torch.randn(6), torch.rand(6) + 0.1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: functional.layer_norm(x, (5, 3)),
        lambda x: functional.layer_norm(x, (3,), torch.ones(3) * 2, torch.ones(3)),
        lambda x: functional.group_norm(x, 3, WEIGHT, BIAS),
        lambda x: functional.batch_norm(x, MEAN, VAR, WEIGHT, BIAS, training=False),
        lambda x: functional.batch_norm(x, MEAN, VAR, None, BIAS, training=False, eps=0.1),
        lambda x: functional.instance_norm(x),
    ],
    ids=["layer", "layer with weights", "groups", "running statistics", "without weights", "instance"],
)
def test_they_are_those_of_torch(function):
    (found,) = of(function, X)
    torch.testing.assert_close(found, function(X), rtol=1e-5, atol=1e-5)


def test_a_batch_norm_in_training_gives_new_statistics():
    def function(x, mean, var):
        return aten._native_batch_norm_legit_functional(x, WEIGHT, BIAS, mean, var, True, 0.1, 1e-5)

    for found, expected in zip(of(function, X, MEAN, VAR), function(X, MEAN, VAR), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_the_gradients_of_a_batch_norm(train):
    out, mean, rstd = aten.native_batch_norm(X, WEIGHT, BIAS, MEAN.clone(), VAR.clone(), True, 0.1, 1e-5)

    def backward(gradient, x, mean, rstd):
        return aten.native_batch_norm_backward(
            gradient, x, WEIGHT, MEAN, VAR, mean, rstd, train, 1e-5, [True, True, True]
        )

    given = (out.sin(), X, mean, rstd)
    for found, expected in zip(of(backward, *given), backward(*given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
