"""Vision Transformer (Dosovitskiy et al. 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.models.base import ImageModel


class Attention(nn.Module):
    """Self-attention over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, in the same shape."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(query, key, value)
        result: Tensor = self.projection(x.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """A pre-norm encoder block over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return x after attention and MLP, in the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class ViT(ImageModel):
    """Images (batch, channels, resolution, resolution) → logits (batch, classes), read from a class token.

    Args:
        layers, width, heads, hidden: blocks, width of a token, attention heads, width of the MLP.
        patch: height and width of a patch; it divides `resolution`.
        dropout: after the embedding, the attention and both layers of the MLP.

    Raises:
        ValueError: `patch` does not divide `resolution`, or `heads` does not divide `width`.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        patch: int = 16,
        *,
        channels: int = 3,
        classes: int = 1000,
        resolution: int = 224,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(channels, classes, resolution)
        if resolution % patch or width % heads:
            raise ValueError(
                f"patch {patch} must divide resolution {resolution}, heads {heads} must divide width {width}"
            )
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (resolution // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                # The head too: zeros, as in the original, would give no gradient to anything before it.
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def logits(self, images: Tensor) -> Tensor:
        """Return class scores (batch, classes); ValueError when images do not have the model's resolution."""
        if images.shape[-2:] != (self.resolution, self.resolution):
            height, width = images.shape[-2:]
            raise ValueError(
                f"images of {height}x{width} pixels, but the model has positions for {self.resolution} squared"
            )
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        x = self.norm(self.blocks(self.dropout(x)))
        result: Tensor = self.head(x[:, 0])
        return result
