"""ViT: the order of patches, the class token, and its bounds."""

import pytest
import torch

from memopt import models
from memopt.models.vit import ViT


def tiny(**options):
    torch.manual_seed(0)
    return ViT(2, 32, 4, 64, 8, classes=10, resolution=32, **options).eval()


def test_patches_are_told_apart_by_their_positions_alone():
    model, images = tiny(), torch.randn(2, 3, 32, 32)
    moved = images.roll(8, -1)
    assert not torch.allclose(model(moved), model(images))
    with torch.no_grad():
        model.positions[:, 1:] = model.positions[:, 1:2]
    torch.testing.assert_close(model(moved), model(images), rtol=1e-4, atol=1e-6)


def test_scores_are_read_from_the_class_token():
    model, images = tiny(), torch.randn(2, 3, 32, 32)
    seen = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    assert model(images).shape == (2, 10)
    with torch.no_grad():
        model.class_token.add_(1.0)
    model(images)
    assert seen[0].shape == (2, 32) and not torch.allclose(*seen)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="patch 5 must divide resolution 32"):
        ViT(2, 32, 4, 64, 5, resolution=32)
    with pytest.raises(ValueError, match="heads 3 must divide width 32"):
        ViT(2, 32, 3, 64, 8, resolution=32)
    with pytest.raises(ValueError, match="images of 16x32 pixels, but the model has positions for 32 squared"):
        tiny()(torch.zeros(1, 3, 16, 32))


def test_every_parameter_of_it_is_trained():
    model = tiny().train()
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    with torch.device("meta"):
        assert sum(parameter.numel() for parameter in models.build("vit_b_16").parameters()) == 86_567_656
