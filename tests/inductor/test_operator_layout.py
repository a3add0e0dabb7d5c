"""Compiled code lays results out as the model's operators do, where these do not go by their operand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler


class Laid(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)
        self.images = nn.BatchNorm2d(3)

    def forward(self, x, images):
        y, shown = self.norm(x.t()), self.plain(x.t())
        return {
            "norm": y,
            "of a batch": F.batch_norm(x.t(), None, None, training=True).relu(),
            "part": shown[1:],
            "as it lies": torch.as_strided(self.plain(x.t() * 2), (3, 2), (2, 1)) * 1,
            "images": self.images(images.transpose(2, 3)),
            "log": F.logsigmoid(x.t()),
            "turned": F.logsigmoid(x.t()).t(),
        }


@pytest.mark.quick("evaluation")
@needs_compiler
@pytest.mark.parametrize("mode", ["training", "evaluation", "statistics"])
def test_strides_and_numbers_are_the_models(mode):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Laid().train(mode != "evaluation")
    run = memopt.compile(model, backend="inductor", verify=False)  # else the model itself would run
    x, images = torch.randn(6, 5), torch.randn(2, 3, 4, 5)
    with torch.set_grad_enabled(mode == "training"):
        expected, found = model(x, images), run(x, images)
    assert {name: value.stride() for name, value in found.items()} == {k: v.stride() for k, v in expected.items()}
    torch.testing.assert_close(found, expected)
