"""Conversions of a module's tensors while it runs on fake ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.capture.eager_call import eager_call
from memopt.capture.shadow import Shadow
from memopt.torch_compat.fake_conversions import converted_as_real


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_parameters_are_converted_in_place_as_real_ones(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    shadow = Shadow(model)
    twin, weight = shadow.model, shadow.model.weight
    (x,), _ = shadow.inputs((torch.ones(2, 4),), {})
    with shadow.running():
        twin(x).sum().backward()
        twin.to(dtype)
        assert twin.weight is weight and isinstance(weight, nn.Parameter) and weight.is_leaf
        assert weight.dtype is dtype and weight.grad is not None and weight.grad.dtype is dtype
        assert weight.untyped_storage().nbytes() == 16 * dtype.itemsize
        assert bool((weight == weight.detach()).all())  # its values are known still
        assert not bool((weight > 2).any())
        twin(x.to(dtype)).sum().backward()
    assert model.weight.dtype is torch.float32 and model.weight.grad is None


def test_real_parameters_are_swapped_as_before() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.ones(3))
    with converted_as_real():
        torch.utils.swap_tensors(first, second)
    assert first.shape == (3,) and second.shape == (2,)


class Router(nn.Module):
    """Converts a layer of its own in forward, as transformers' Switch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer = self.layer.to(x.dtype)
        return self.layer(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_converts_a_layer_in_forward_is_counted(dtype: torch.dtype) -> None:
    model = Router()
    seen = eager_call(model, (torch.ones(2, 8, dtype=dtype),), {}, None)
    assert seen is not None and dict(seen.peaks.gradients)["layer.weight"] == 64 * dtype.itemsize
    assert model.layer.weight.dtype is torch.float32
