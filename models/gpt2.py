"""GPT-2 (Radford et al. 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.models.base import TokenModel, check_length, next_token_loss


class Attention(nn.Module):
    """Causal self-attention over (batch, sequence, width), with dropout on the weights and on the result."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended values, in the same shape."""
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.attention_dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        result: Tensor = self.dropout(self.projection(x.transpose(1, 2).flatten(2)))
        return result


class Block(nn.Module):
    """A pre-norm decoder block over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand, self.activation = nn.Linear(width, 4 * width), nn.GELU(approximate="tanh")
        self.projection, self.dropout = nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return x after attention and MLP, in the same shape."""
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.dropout(self.projection(self.activation(self.expand(self.norm2(x)))))
        return result


class GPT2(TokenModel):
    """Tokens (batch, sequence) → logits (batch, sequence, vocabulary); the head is the token embedding (tied).

    Args:
        layers, width, heads: blocks, width of a token, attention heads.
        vocabulary: number of tokens.
        positions: the longest sequence.
        sequence: length of example inputs; `positions` by default.
        dropout: on embeddings, attention weights, and the results of attention and MLP.

    Raises:
        ValueError: `heads` does not divide `width`.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        *,
        vocabulary: int = 50257,
        positions: int = 1024,
        sequence: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__(vocabulary, positions if sequence is None else sequence)
        if width % heads:
            raise ValueError(f"heads {heads} must divide width {width}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                # Layers that end a residual branch start smaller: the sum of the branches must not grow with depth.
                scale = 1 / math.sqrt(2 * layers) if name.endswith("projection") else 1.0
                nn.init.normal_(module.weight, std=0.02 * scale)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits or, with labels (batch, sequence), the mean next-token loss (-100 is ignored).

        Raises:
            ValueError: the sequences are longer than `positions`.
        """
        check_length(input_ids, self.positions.num_embeddings)
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if labels is None else next_token_loss(logits, labels)
