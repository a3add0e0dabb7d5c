"""Convolutions with activations behind them, as FoldActivation is to find them."""

import torch
from torch import nn

LAST = torch.channels_last


def images(channels=8, size=12, batch=4):
    return torch.randn(batch, channels, size, size).to(memory_format=LAST)


class Bottleneck(nn.Module):
    """A ResNet bottleneck after its batch norms have been folded."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.c3 = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        return (self.c3(self.c2(self.c1(x).relu()).relu()) + x).relu()


def conv(activation, **options):
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, **options), activation).to(memory_format=LAST)
