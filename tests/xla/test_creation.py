"""Tensors made of numbers alone, as JAX functions."""

import pytest
import torch

from tests.xla.test_lower import of


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.arange(5) + x.long(),
        lambda x: torch.arange(2, 9, 3, dtype=torch.float32)[:2] * x[:2],
        lambda x: torch.arange(0.5, 3.0, 0.5) * x,
        lambda x: torch.arange(5, -5, -2) - x.long(),
        lambda x: torch.full((2, 5), 7, dtype=torch.int32) + x.int(),
        lambda x: torch.zeros(5, dtype=torch.float64) + x,
        lambda x: torch.ones(2, 1) * x,
        lambda x: torch.full_like(x, 2.5) + torch.zeros_like(x) - torch.ones_like(x, dtype=torch.float64),
        lambda x: x.new_full((5,), 3) + x.new_zeros(5) + x.new_ones(1),
    ],
    ids=["ends", "steps", "parts", "down", "full", "zeros", "ones", "like", "new"],
)
def test_they_have_torch_s_values_and_types(function):
    x = torch.tensor([3.0, -1.0, 0.0, 2.0, 5.0])
    (found,) = of(function, x)
    torch.testing.assert_close(found, function(x), rtol=0.0, atol=0.0)
