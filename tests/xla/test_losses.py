"""Gradients of losses, as JAX functions."""

import pytest
import torch

from tests.xla.test_lower import of


@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (2, 3, 2, 2)], ids=["rows", "images"])
def test_the_gradient_of_picked_logarithms_is_torch_s(shape, weighted, reduction):
    torch.manual_seed(0)
    x, target = torch.randn(shape), torch.randint(0, 3, (shape[0], *shape[2:]))
    target.view(-1)[1] = -100  # is left out
    weight = torch.tensor([1.0, 2.0, 0.5]) if weighted else None
    name = "nll_loss" if len(shape) == 2 else "nll_loss2d"
    _, total = getattr(torch.ops.aten, f"{name}_forward")(x, target, weight, reduction, -100)
    gradient = torch.randn(target.shape) if reduction == 0 else torch.tensor(1.5)

    def backward(gradient, x, target, total):
        return getattr(torch.ops.aten, f"{name}_backward")(gradient, x, target, weight, reduction, -100, total)

    (found,) = of(backward, gradient, x, target, total)
    torch.testing.assert_close(found, backward(gradient, x, target, total))
