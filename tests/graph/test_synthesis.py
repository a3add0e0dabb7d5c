"""Made-up values: real, laid out like the fake ones, valid as indices, and drawn without a trace."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from memopt.graph.synthesis import is_cuda, same_random_state, synthesize


def like(tensor: torch.Tensor) -> torch.Tensor:
    return synthesize(FakeTensorMode().from_tensor(tensor, static_shapes=True))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, 3),
        torch.empty(3, 2).t(),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.empty(4, 6)[::2, ::3],
        torch.empty(3, 1).expand(3, 4),
        torch.empty(0, 3),
        torch.empty(()),
        torch.empty(5, dtype=torch.bfloat16),
        torch.empty(5, dtype=torch.complex64),
    ],
)
def test_floats_are_random_in_the_same_layout(tensor: torch.Tensor) -> None:
    found = like(tensor)
    assert not isinstance(found, FakeTensor)
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert not found.requires_grad and found.isfinite().all()
    assert found.numel() == 0 or found.count_nonzero() > 0


def test_overlapping_elements_are_one_random_number_each() -> None:
    found = like(torch.empty(50, 1).expand(50, 4))
    assert torch.equal(found, found[:, :1].expand(50, 4))
    assert len(found[:, 0].unique()) > 40


def test_floats_are_normal_with_the_given_scale() -> None:
    fake = FakeTensorMode().from_tensor(torch.empty(10000), static_shapes=True)
    for scale in (1.0, 0.01):
        values = synthesize(fake, scale=scale)
        assert values.std().item() == pytest.approx(scale, rel=0.1) and abs(values.mean().item()) < 0.1 * scale


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers_and_booleans_are_zeros(dtype: torch.dtype) -> None:
    found = like(torch.ones(4, 2, dtype=dtype))
    assert found.dtype is dtype and not found.any()


def test_structures_keep_their_shape_and_numbers_their_value() -> None:
    fake = FakeTensorMode().from_tensor(torch.empty(2), static_shapes=True)
    one, (two, three, nothing) = synthesize((fake, [7, fake, None]))
    assert (one.shape, two, three.shape, nothing) == ((2,), 7, (2,), None)
    assert not torch.equal(one, three)


def test_random_state_is_restored_even_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyError), same_random_state([torch.ones(2), 3, None]):
        torch.manual_seed(5)
        torch.rand(3)
        raise KeyError
    assert torch.equal(torch.get_rng_state(), state)


def test_a_tensor_on_a_fake_device_counts_as_on_that_device() -> None:
    with FakeTensorMode():
        assert is_cuda(torch.empty(2, device="cuda")) and not is_cuda(torch.empty(2))
    assert not is_cuda("cuda")
