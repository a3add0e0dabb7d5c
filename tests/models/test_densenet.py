"""What a dense block keeps, and the widths between blocks."""

import torch

from memopt import models
from memopt.models.densenet import DenseBlock


def test_a_dense_block_keeps_its_input_and_earlier_features():
    block = DenseBlock(3, 6, 4, 4, 0.0).eval()
    x = torch.randn(2, 6, 5, 5)
    result = block(x)
    assert result.shape == (2, 6 + 3 * 4, 5, 5)
    assert torch.equal(result[:, :6], x)
    assert torch.equal(result[:, 6:10], block.layers[0]([x]))


def test_stages_of_densenet161():
    with torch.device("meta"):
        model = models.build("densenet161")
        x = model.stem(model.example_inputs(1)["images"])
        shapes = [tuple((x := stage(x)).shape[1:3]) for stage in model.stages]
    assert shapes == [(384, 56), (192, 28), (768, 28), (384, 14), (2112, 14), (1056, 7), (2208, 7)]
