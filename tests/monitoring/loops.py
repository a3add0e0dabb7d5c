"""A small model and loop whose bytes are known."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, BATCH = 64, 32


class Block(nn.Module):
    """Two layers; relu saves its result, which is as large as what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two blocks in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def trained(steps=6, each=lambda out, loss: None, device="cpu", model=None):
    """Train for some steps; `each` is called after each with its output and its loss. Returns the losses."""
    torch.manual_seed(0)
    net = (model or Net()).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    losses = []
    for _ in range(steps):
        x = torch.randn(BATCH, WIDTH, device=device)
        out = net(x)
        loss = out.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        each(out, loss)
    return losses
