"""Concatenations of one tensor lie as eager's, though Inductor writes them out as copies."""

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler

pytestmark = pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")


class Caches(nn.Module):
    """Keys as a cache takes them for the first time, and other concatenations of one tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.keys, self.images = nn.Linear(16, 16), nn.Conv2d(3, 4, 1)

    def forward(self, x, images):
        keys = self.keys(x).view(2, 8, 4, 4).transpose(1, 2)
        images = self.images(images)
        return (
            torch.cat([torch.empty(0), keys], -2),
            torch.cat([keys[:, :, :0], keys], -2).detach(),
            torch.cat([keys]),
            torch.cat([images]),
            torch.cat([images, images[:, :0]], 1),
            torch.cat([keys, keys], 1),
            keys.square().sum() + images.square().sum(),
        )


@pytest.mark.parametrize("training", [True, False])
def test_they_lie_as_in_eager(training):
    torch._dynamo.reset()
    model = Caches()
    given = torch.randn(2, 8, 16), torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)
    with torch.set_grad_enabled(training):
        run = memopt.compile(model, "1MB" if training else None, backend="inductor")
        found, expected = run(*given), model(*given)
    torch.testing.assert_close(found, expected)
    assert [value.stride() for value in found] == [value.stride() for value in expected]
