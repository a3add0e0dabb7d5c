"""U-Net (Ronneberger et al. 2015).

The paper's network (31,030,658 parameters): 1 channel in, 2 classes, biased 3x3 convolutions without batch norm, 2x2
up-convolutions, dropout at the end of the contracting path. One thing differs by default: convolutions are padded, so
that the output is as large as the image; `padded=False` gives the paper's 572² → 388². `batch_norm=True` gives the
variant that most implementations use today.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from memopt.models.base import ImageModel


def _double_conv(inputs: int, outputs: int, padded: bool, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for source in (inputs, outputs):
        layers.append(nn.Conv2d(source, outputs, 3, padding=int(padded), bias=not batch_norm))
        if batch_norm:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class Up(nn.Module):
    """Up-convolution to half the channels, concatenation with the cropped skip connection, double convolution."""

    def __init__(self, inputs: int, padded: bool, batch_norm: bool) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, 2)
        self.conv = _double_conv(inputs, inputs // 2, padded, batch_norm)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        """(batch, inputs, h, w) and a larger skip (batch, inputs/2, …) → (batch, inputs/2, 2h, 2w), less unpadded."""
        x = self.up(x)
        height, width = x.shape[-2:]
        top, left = (skip.shape[-2] - height) // 2, (skip.shape[-1] - width) // 2
        skip = skip[..., top : top + height, left : left + width]
        result: Tensor = self.conv(torch.cat((skip, x), 1))
        return result


class UNet(ImageModel):
    """Images (batch, channels, h, w) → logits per pixel (batch, classes, h, w), smaller when unpadded.

    Args:
        width: channels of the first level; each deeper one has twice as many.
        depth: how many times the resolution is halved.
        padded: keep the size of the image; False is the paper's.
        batch_norm: a batch norm after each 3x3 convolution, which then has no bias.
        dropout: at the end of the contracting path (the last level before the bottom, and the bottom).
    """

    def __init__(
        self,
        width: int = 64,
        depth: int = 4,
        *,
        channels: int = 1,
        classes: int = 2,
        resolution: int = 512,
        padded: bool = True,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(channels, classes, resolution)
        self.padded = padded
        widths = [width << level for level in range(depth + 1)]
        sources = [channels, *widths]
        self.down = nn.ModuleList(
            _double_conv(source, target, padded, batch_norm) for source, target in zip(sources, widths, strict=False)
        )
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(dropout)
        self.up = nn.ModuleList(Up(source, padded, batch_norm) for source in reversed(widths[1:]))
        self.head = nn.Conv2d(width, classes, 1)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                # The paper: std √(2/N), N the values that one output sums: one tap of a 2x2 up-convolution, stride 2.
                taps = math.prod(module.kernel_size) if isinstance(module, nn.Conv2d) else 1
                nn.init.normal_(module.weight, std=math.sqrt(2 / (taps * module.in_channels)))
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def output_resolution(self, resolution: int) -> int:
        """The size of the output for an image of that size.

        Raises:
            ValueError: the image cannot be halved `depth` times without a remainder, or nothing of it is left.
        """
        size, lost, depth = resolution, 0 if self.padded else 4, len(self.up)
        for _ in range(depth):
            size -= lost
            if size < 2 or size % 2:
                raise ValueError(
                    f"a U-Net of depth {depth} cannot take images of {resolution} pixels: {size} is not even"
                )
            size //= 2
        size -= lost
        for _ in range(depth):
            size = 2 * size - lost
        if size < 1:
            raise ValueError(f"a U-Net of depth {depth} leaves nothing of images of {resolution} pixels")
        return size

    def label_shape(self, batch: int, resolution: int) -> tuple[int, ...]:
        """The shape of the labels: one per pixel of the output."""
        size = self.output_resolution(resolution)
        return (batch, size, size)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes, h, w) of images (batch, channels, h, w); ValueError: see above."""
        for size in images.shape[-2:]:
            self.output_resolution(size)
        skips, x, bottom = [], images, len(self.down) - 1
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            if level >= bottom - 1:
                x = self.dropout(x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            x = block(x, skips.pop())
        result: Tensor = self.head(x)
        return result
