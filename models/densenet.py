"""DenseNet-BC (Huang et al. 2016): each layer reads the concatenation of all earlier ones in its block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.models.base import ImageModel


class DenseLayer(nn.Module):
    """Norm, relu, 1x1, norm, relu, 3x3: (batch, inputs, h, w) → (batch, growth, h, w), the new features alone."""

    def __init__(self, inputs: int, growth: int, bottleneck: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = dropout

    def forward(self, features: list[Tensor]) -> Tensor:
        """Return the new features (batch, growth, h, w) made from all earlier ones."""
        x = self.conv1(self.relu(self.norm1(torch.cat(features, 1))))
        result: Tensor = self.conv2(self.relu(self.norm2(x)))
        return F.dropout(result, self.dropout, self.training) if self.dropout > 0 else result


class DenseBlock(nn.Module):
    """`depth` dense layers: (batch, inputs, h, w) → (batch, inputs + depth·growth, h, w)."""

    def __init__(self, depth: int, inputs: int, growth: int, bottleneck: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            DenseLayer(inputs + index * growth, growth, bottleneck, dropout) for index in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the input and all new features, concatenated."""
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), nn.Conv2d(inputs, outputs, 1, bias=False), nn.AvgPool2d(2)
    )


class DenseNet(ImageModel):
    """Images (batch, channels, h, w) → logits (batch, classes).

    Args:
        layers: dense layers in each block; a transition that halves channels and resolution stands between two blocks.
        growth: channels that each dense layer adds.
        width: channels of the stem.
        bottleneck: channels of the 1x1 convolution, in multiples of `growth`.
        dropout: after each dense layer; none by default, as with data augmentation in the paper.
    """

    def __init__(
        self,
        layers: Sequence[int] = (6, 12, 24, 16),
        growth: int = 32,
        width: int = 64,
        bottleneck: int = 4,
        *,
        channels: int = 3,
        classes: int = 1000,
        resolution: int = 224,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, classes, resolution)
        self.stem = nn.Sequential(
            nn.Conv2d(channels, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        stages: list[nn.Module] = []
        for index, depth in enumerate(layers):
            if index:
                stages.append(_transition(width, width // 2))
                width //= 2
            stages.append(DenseBlock(depth, width, growth, bottleneck, dropout))
            width += depth * growth
        self.stages = nn.Sequential(*stages)
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes) of images (batch, channels, h, w)."""
        x = self.relu(self.norm(self.stages(self.stem(images))))
        result: Tensor = self.classifier(self.pool(x).flatten(1))
        return result
