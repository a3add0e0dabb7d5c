"""Timing of a short piece of work, and the made-up values that it is done on."""

import time

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memopt.backends.timing import made_like, seconds_of

CPU = torch.device("cpu")


def fake(*shape, stride=None, dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty_strided(shape, stride or torch.empty(shape, device="meta").stride(), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_made_up_values_are_real_random_and_of_the_same_layout(dtype):
    made = made_like(fake(3, 4, stride=(1, 3), dtype=dtype))
    assert (made.shape, made.stride(), made.dtype, made.device) == ((3, 4), (1, 3), dtype, CPU)
    assert type(made) is torch.Tensor and made.double().std() > 0.1


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_is_no_number_with_a_fraction_is_zero_which_every_table_holds(dtype):
    made = made_like(fake(5, dtype=dtype))
    assert made.dtype is dtype and not made.any()


def test_another_layout_is_for_four_dimensions():
    assert made_like(fake(2, 3, 4, 5), torch.channels_last).stride() == (60, 1, 15, 3)
    assert made_like(fake(2, 3, 4), torch.channels_last).stride() == (12, 4, 1)
    assert made_like(fake(0, 3)).numel() == 0


def test_the_least_time_counts_after_calls_to_warm_up():
    calls = []

    def run():
        calls.append(1)
        time.sleep(0.3 if len(calls) in (1, 2, 5) else 0.002)

    assert 0.002 <= seconds_of(run, CPU) < 0.3
    assert len(calls) > 3


def test_work_that_cannot_be_done_says_so():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        seconds_of(lambda: torch.ones(2, 3) @ torch.ones(2, 3), CPU)


@pytest.mark.gpu
def test_on_a_device_the_work_is_captured():
    x, device = torch.ones(1 << 20, device="cuda"), torch.device("cuda")
    assert 0 < seconds_of(lambda: x.add_(1), device) < 1e-3
    with pytest.raises(RuntimeError):
        seconds_of(lambda: x.sum().item(), device)
    assert float(x[0]) > 1
