"""Models in lower precision, widened: no number changes, and what is wide enough stays."""

import pytest
import torch
from torch import nn

from memopt.convert.widen import widened


class Mixed(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear, self.tied = nn.Linear(3, 4, dtype=dtype), nn.Linear(3, 4, dtype=dtype)
        self.tied.weight = self.linear.weight
        self.register_buffer("exact", torch.tensor([1 / 3], dtype=torch.float64))
        self.register_buffer("places", torch.arange(3))

    def forward(self, x):
        return self.linear(x) + self.tied(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("consume", [False, True])
def test_narrow_tensors_are_wide_and_hold_the_same_numbers(dtype, consume):
    model = Mixed(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inputs = {"x": torch.randn(2, 3).to(dtype), "more": [torch.ones(1, dtype=dtype), torch.ones(1).long(), 3, None]}
    wide, given = widened(model, inputs, consume=consume)
    assert (wide is model) is consume
    found = wide.state_dict()
    assert {name: value.dtype for name, value in found.items()} == {
        **dict.fromkeys(before, torch.float32), "exact": torch.float64, "places": torch.int64,
    }  # fmt: skip
    assert all(torch.equal(value.double(), before[name].double()) for name, value in found.items())
    assert wide.tied.weight is wide.linear.weight
    assert given["x"].dtype is torch.float32 and torch.equal(given["x"], inputs["x"].float())
    assert [getattr(item, "dtype", item) for item in given["more"]] == [torch.float32, torch.int64, 3, None]
    assert inputs["x"].dtype is dtype and wide(given["x"]).dtype is torch.float32
    if not consume:
        assert all(value.dtype is before[name].dtype for name, value in model.state_dict().items())


def test_a_model_that_is_wide_is_returned_with_its_inputs_as_they_are():
    model, inputs = nn.Linear(2, 2), {"x": torch.ones(1, 2, dtype=torch.float16)}
    assert widened(model, inputs, consume=False) == (model, inputs)
    buffers = nn.BatchNorm1d(2, affine=False).half()
    assert widened(buffers, {}, consume=True)[0].running_mean.dtype is torch.float32
