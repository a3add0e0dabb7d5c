"""Llama (Touvron et al. 2023; Llama 3.2, 2024): RMS norms, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.models.base import TokenModel, next_token_loss


class RotaryScaling(NamedTuple):
    """How Llama 3.1 and later stretch rotary positions beyond the context that they were first trained on.

    Frequencies that turn less than `low` times in the original context are divided by `factor`, those that turn more
    than `high` times are kept, and those between are interpolated.
    """

    factor: float = 32.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192


def rotary_angles(positions: Tensor, size: int, theta: float, scaling: RotaryScaling | None) -> Tensor:
    """The angles (sequence, size / 2) of each pair of a head's `size` coordinates, in the dtype of the positions."""
    frequencies = torch.pow(theta, -torch.arange(0, size, 2, dtype=positions.dtype, device=positions.device) / size)
    if scaling is not None:
        turns = scaling.context / (2 * math.pi) * frequencies
        kept = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    return positions[:, None] * frequencies


class RMSNorm(nn.Module):
    """Divides (…, width) by its root mean square and scales it, in at least single precision."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x normalised, in the same shape and dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, width); each key and value head serves several query heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.attention_dropout = heads, kv_heads, dropout
        size = width // heads
        self.query = nn.Linear(width, heads * size, bias=False)
        self.key = nn.Linear(width, kv_heads * size, bias=False)
        self.value = nn.Linear(width, kv_heads * size, bias=False)
        self.projection = nn.Linear(heads * size, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attended values, in the same shape; cos and sin are (sequence, width / heads)."""
        query = _rotate(self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), cos, sin)
        key = _rotate(self.key(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), cos, sin)
        value = self.value(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if self.kv_heads < self.heads:
            # Repeated, as in the original: not every fused kernel of every version of torch takes enable_gqa.
            key, value = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (key, value))
        dropout = self.attention_dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.projection(x.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """A pre-norm decoder block over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int, eps: float, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = RMSNorm(width, eps), Attention(width, heads, kv_heads, dropout)
        self.norm2 = RMSNorm(width, eps)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x after attention and MLP, in the same shape."""
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        y = self.norm2(x)
        result: Tensor = x + self.dropout(self.down(F.silu(self.gate(y)) * self.up(y)))
        return result


class Llama(TokenModel):
    """Tokens (batch, sequence) → logits (batch, sequence, vocabulary); the head is the token embedding unless untied.

    Args:
        layers, width, heads, hidden: blocks, width of a token, query heads, width of the MLP.
        kv_heads: key and value heads, each of which serves heads / kv_heads query heads.
        vocabulary: number of tokens.
        sequence: length of example inputs; the model itself has no longest sequence.
        theta: base of the rotary frequencies.
        scaling: how the rotary frequencies are stretched; None leaves them.
        eps: of the RMS norms.
        tied: whether the head is the token embedding.
        dropout: on attention weights and the results of attention and MLP; the original has none.

    Raises:
        ValueError: `heads` does not divide `width`, `kv_heads` does not divide `heads`, or the size of a head is odd.
    """

    def __init__(
        self,
        layers: int = 16,
        width: int = 2048,
        heads: int = 32,
        kv_heads: int = 8,
        hidden: int = 8192,
        *,
        vocabulary: int = 128256,
        sequence: int = 2048,
        theta: float = 500000.0,
        scaling: RotaryScaling | None = None,
        eps: float = 1e-5,
        tied: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(vocabulary, sequence)
        if width % (2 * heads) or heads % kv_heads:
            raise ValueError(f"twice heads {heads} must divide width {width}, kv_heads {kv_heads} must divide heads")
        self.head_size, self.theta, self.scaling = width // heads, theta, scaling
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads, hidden, eps, dropout) for _ in range(layers))
        self.norm = RMSNorm(width, eps)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def _rotations(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (sequence, width / heads) for hidden states x (batch, sequence, width), in its dtype."""
        # Made at each call rather than kept: a buffer would lose its precision in model.to(torch.bfloat16).
        dtype = torch.promote_types(x.dtype, torch.float32)
        positions = torch.arange(x.shape[1], dtype=dtype, device=x.device)
        angles = rotary_angles(positions, self.head_size, self.theta, self.scaling).repeat(1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits or, with labels (batch, sequence), the mean next-token loss (-100 is ignored)."""
        x = self.tokens(input_ids)
        cos, sin = self._rotations(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)
