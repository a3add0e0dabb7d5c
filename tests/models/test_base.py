"""What the reference models share: losses, example inputs, and sizes that are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memopt.models.base import IGNORED, ImageModel


class Mean(ImageModel):
    """Class scores of the mean of each channel."""

    def __init__(self):
        super().__init__(2, 5, 8)
        self.head = nn.Linear(2, 5, dtype=torch.float64)

    def logits(self, images):
        return self.head(images.mean((2, 3)))


def test_without_labels_scores_and_with_them_the_loss():
    model = Mean()
    inputs = model.example_inputs(3, resolution=4, labels=True)
    assert inputs["images"].shape == (3, 2, 4, 4) and inputs["images"].dtype is torch.float64
    assert inputs["labels"].shape == (3,) and inputs["labels"].max() < 5
    scores = model(inputs["images"])
    assert torch.equal(model(**inputs), F.cross_entropy(scores, inputs["labels"]))
    assert model(inputs["images"][:1], torch.tensor([IGNORED])).isnan(), "it counts for nothing"


def test_images_are_of_the_model_s_own_resolution_unless_another_is_asked_for():
    model = Mean()
    assert model.example_inputs(1)["images"].shape == (1, 2, 8, 8) and "labels" not in model.example_inputs(1)
    with pytest.raises(ValueError):
        model.example_inputs(0)
