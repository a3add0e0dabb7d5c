"""A diffusion loop within a budget, a U-Net that predicts noise: `python examples/diffusion.py --budget 60%`.

Needs `pip install memopt diffusers`. A tiny U-Net with random weights: nothing is downloaded, and a CPU suffices.
"""

from __future__ import annotations

import argparse

import torch
from diffusers import DDPMScheduler, UNet2DModel
from torch import nn

import memopt


def main() -> None:
    """Train a few steps on random images, and print the losses and what was planned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", default="60%", help="as memopt.compile takes it: 20GB, 60%%; none: without memopt")
    parser.add_argument("--backend", default=None, help="as memopt.compile takes it")
    given = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    unet: nn.Module = UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=8,
        attention_head_dim=8,
    ).to(device)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    limited = given.budget != "none"
    if limited:
        unet = memopt.compile(unet, given.budget, optimizer=optimizer, backend=given.backend)
    scheduler = DDPMScheduler()
    for _ in range(4):
        images, noise = torch.randn(2, 8, 3, 16, 16, device=device)
        steps = torch.randint(0, 1000, (8,), device=device)
        noisy = scheduler.add_noise(images, noise, steps)
        loss = nn.functional.mse_loss(unet(noisy, steps).sample, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss.item():.6f}")
    if limited:
        print(unet.report)


if __name__ == "__main__":
    main()
