"""Where a ResNet halves its resolution, and what its last block adds up."""

import torch

from memopt import models


def test_stages_halve_the_resolution_and_double_the_width():
    with torch.device("meta"):
        model = models.build("resnet50")
        x = model.stem(model.example_inputs(1)["images"])
        assert x.shape == (1, 64, 56, 56)
        for stage, shape in zip(model.stages, [(256, 56), (512, 28), (1024, 14), (2048, 7)], strict=True):
            x = stage(x)
            assert x.shape == (1, shape[0], shape[1], shape[1])
    # Version 1.5: the 3x3 convolution has the stride, not the 1x1 before it.
    first = model.stages[1][0]
    assert (first.conv1.stride, first.conv2.stride, first.downsample[0].stride) == ((1, 1), (2, 2), (2, 2))


def test_a_block_with_zeroed_last_norm_is_its_shortcut():
    model = models.build("resnet50", tiny=True).eval()
    block = model.stages[0][1]
    assert block.downsample is None
    torch.nn.init.zeros_(block.bn3.weight)
    x = torch.randn(2, 32, 8, 8).relu()
    assert torch.equal(block(x), x)
