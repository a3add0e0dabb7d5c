"""The variants of the U-Net: the paper's sizes, and those of the usual implementation with batch norms."""

import pytest
import torch
from torch import nn

from memopt.models.unet import UNet, Up


def on_meta(**options):
    with torch.device("meta"):
        return UNet(**options)


def test_the_paper_without_padding():
    model = on_meta(padded=False, resolution=572)
    inputs = model.example_inputs(1, labels=True)
    assert inputs["labels"].shape == (1, 388, 388)
    assert model(inputs["images"]).shape == (1, 2, 388, 388)
    assert model(**inputs).shape == ()


def test_batch_norms_count_as_in_the_usual_implementation():
    model = on_meta(channels=3, batch_norm=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 31_037_698


@pytest.mark.parametrize(("padded", "resolution"), [(True, 36), (True, 8), (False, 512), (False, 12), (False, 108)])
def test_sizes_that_cannot_be_halved_are_refused(padded, resolution):
    model = on_meta(padded=padded)
    with pytest.raises(ValueError, match=f"of {resolution} pixels"):
        model(torch.empty(1, 1, resolution, resolution, device="meta"))


def test_the_skip_is_cropped_in_the_middle_and_comes_first():
    up = Up(4, padded=False, batch_norm=False)
    up.conv = nn.Identity()
    x, skip = torch.randn(1, 4, 3, 3), torch.randn(1, 2, 10, 12)
    result = up(x, skip)
    assert torch.equal(result[:, :2], skip[..., 2:8, 3:9])
    assert torch.equal(result[:, 2:], up.up(x))
