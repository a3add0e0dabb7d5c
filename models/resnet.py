"""ResNet (He et al. 2015), with the stride of a bottleneck in its 3x3 convolution (v1.5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from memopt.models.base import ImageModel


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(_conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: (batch, inputs, h, w) → (batch, width, h/stride, w/stride)."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(f(x) + shortcut(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        result: Tensor = self.relu(x + shortcut)
        return result


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut: (batch, inputs, h, w) → (batch, 4·width, h/stride, w/stride)."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return relu(f(x) + shortcut(x))."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        result: Tensor = self.relu(x + shortcut)
        return result


class ResNet(ImageModel):
    """Images (batch, channels, h, w) → logits (batch, classes).

    Args:
        block: BasicBlock (ResNet-18) or Bottleneck (50, 152).
        layers: blocks in each stage.
        width: channels of the first stage; each later stage has twice as many and half the resolution.
        dropout: before the classifier; the original has none.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck] = Bottleneck,
        layers: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
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
        stages, inputs = [], width
        for stage, depth in enumerate(layers):
            blocks = []
            for index in range(depth):
                blocks.append(block(inputs, width << stage, 2 if stage and not index else 1))
                inputs = (width << stage) * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, classes)
        self.dropout = dropout
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes) of images (batch, channels, h, w)."""
        x = self.pool(self.stages(self.stem(images))).flatten(1)
        if self.dropout > 0:
            x = F.dropout(x, self.dropout, self.training)
        result: Tensor = self.fc(x)
        return result
