"""MobileNetV3 large and small (Howard et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from memopt.models.base import ImageModel


class Row(NamedTuple):
    """One inverted residual block, as in the paper's tables 1 and 2."""

    kernel: int
    expanded: int
    outputs: int
    squeeze: bool
    hardswish: bool
    stride: int


LARGE = (
    Row(3, 16, 16, False, False, 1),
    Row(3, 64, 24, False, False, 2),
    Row(3, 72, 24, False, False, 1),
    Row(5, 72, 40, True, False, 2),
    Row(5, 120, 40, True, False, 1),
    Row(5, 120, 40, True, False, 1),
    Row(3, 240, 80, False, True, 2),
    Row(3, 200, 80, False, True, 1),
    Row(3, 184, 80, False, True, 1),
    Row(3, 184, 80, False, True, 1),
    Row(3, 480, 112, True, True, 1),
    Row(3, 672, 112, True, True, 1),
    Row(5, 672, 160, True, True, 2),
    Row(5, 960, 160, True, True, 1),
    Row(5, 960, 160, True, True, 1),
)
SMALL = (
    Row(3, 16, 16, True, False, 2),
    Row(3, 72, 24, False, False, 2),
    Row(3, 88, 24, False, False, 1),
    Row(5, 96, 40, True, True, 2),
    Row(5, 240, 40, True, True, 1),
    Row(5, 240, 40, True, True, 1),
    Row(5, 120, 48, True, True, 1),
    Row(5, 144, 48, True, True, 1),
    Row(5, 288, 96, True, True, 2),
    Row(5, 576, 96, True, True, 1),
    Row(5, 576, 96, True, True, 1),
)
# One row of each kind above, in the same order, with an eighth to a quarter of the channels.
LARGE_TINY = (
    Row(3, 16, 16, False, False, 1),
    Row(3, 32, 16, False, False, 2),
    Row(5, 32, 24, True, False, 2),
    Row(5, 48, 24, True, False, 1),
    Row(3, 48, 32, False, True, 1),
    Row(3, 64, 32, False, True, 1),
    Row(3, 64, 40, True, True, 1),
    Row(5, 80, 40, True, True, 1),
)
SMALL_TINY = (
    Row(3, 16, 16, True, False, 2),
    Row(3, 32, 24, False, False, 1),
    Row(3, 48, 24, False, False, 1),
    Row(5, 48, 32, True, True, 2),
    Row(5, 64, 32, True, True, 1),
)


def _divisible(channels: float) -> int:
    """Round to a multiple of 8 that is no more than a tenth below."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * channels else rounded


def _conv_bn(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, activation: nn.Module | None = None
) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.01)
    return nn.Sequential(conv, norm) if activation is None else nn.Sequential(conv, norm, activation)


class SqueezeExcite(nn.Module):
    """Scales each channel of (batch, channels, h, w) by a gate computed from all channels' means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        squeezed = _divisible(channels // 4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce, self.relu = nn.Conv2d(channels, squeezed, 1), nn.ReLU(inplace=True)
        self.expand, self.gate = nn.Conv2d(squeezed, channels, 1), nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return x scaled, in the same shape."""
        scale: Tensor = self.gate(self.expand(self.relu(self.reduce(self.pool(x)))))
        return scale * x


class InvertedResidual(nn.Module):
    """Expand (1x1), depthwise, squeeze-and-excite, project (1x1); a shortcut where the shapes allow."""

    def __init__(self, inputs: int, row: Row) -> None:
        super().__init__()
        self.shortcut = row.stride == 1 and inputs == row.outputs
        kind = nn.Hardswish if row.hardswish else nn.ReLU
        layers: list[nn.Module] = []
        if row.expanded != inputs:
            layers.append(_conv_bn(inputs, row.expanded, activation=kind(inplace=True)))
        layers.append(
            _conv_bn(row.expanded, row.expanded, row.kernel, row.stride, row.expanded, activation=kind(inplace=True))
        )
        if row.squeeze:
            layers.append(SqueezeExcite(row.expanded))
        layers.append(_conv_bn(row.expanded, row.outputs))
        self.block = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, inputs, h, w) → (batch, row.outputs, h/stride, w/stride)."""
        result: Tensor = self.block(x)
        return result + x if self.shortcut else result


class MobileNetV3(ImageModel):
    """Images (batch, channels, h, w) → logits (batch, classes).

    Args:
        rows: the blocks: LARGE, SMALL or one's own.
        hidden: width of the layer before the classifier (1280 large, 1024 small).
        dropout: before the classifier.
    """

    def __init__(
        self,
        rows: Sequence[Row] = LARGE,
        hidden: int = 1280,
        *,
        channels: int = 3,
        classes: int = 1000,
        resolution: int = 224,
        dropout: float = 0.2,
    ) -> None:
        super().__init__(channels, classes, resolution)
        stem = 16
        layers: list[nn.Module] = [_conv_bn(channels, stem, 3, 2, activation=nn.Hardswish(inplace=True))]
        inputs = stem
        for row in rows:
            layers.append(InvertedResidual(inputs, row))
            inputs = row.outputs
        layers.append(_conv_bn(inputs, 6 * inputs, activation=nn.Hardswish(inplace=True)))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * inputs, hidden),
            nn.Hardswish(inplace=True),
            nn.Dropout(dropout, inplace=True),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes) of images (batch, channels, h, w)."""
        result: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return result
