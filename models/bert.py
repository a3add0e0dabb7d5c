"""BERT (Devlin et al. 2018): the encoder, and the masked language model that is trained with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.models.base import IGNORED, TokenModel, check_length


class Layer(nn.Module):
    """A post-norm encoder layer over (batch, sequence, width)."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.attention_dropout = heads, dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.expand, self.activation = nn.Linear(width, hidden), nn.GELU()
        self.contract, self.norm2 = nn.Linear(hidden, width), nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return x after attention (where mask, (batch, 1, 1, sequence), is true) and MLP, in the same shape."""
        query, key, value = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        dropout = self.attention_dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        x = self.norm1(x + self.dropout(self.projection(attended.transpose(1, 2).flatten(2))))
        result: Tensor = self.norm2(x + self.dropout(self.contract(self.activation(self.expand(x)))))
        return result


class Encoder(nn.Module):
    """Tokens (batch, sequence) → hidden states (batch, sequence, width), or with a pooler their summary (batch, width).

    Args:
        layers, width, heads, hidden, vocabulary, positions, segments, dropout: as in BertForMaskedLM.
        pooler: whether to pass the first hidden state through a tanh layer, as the original's next-sentence task does.

    Raises:
        ValueError: `heads` does not divide `width`.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        *,
        vocabulary: int = 30522,
        positions: int = 512,
        segments: int = 2,
        dropout: float = 0.1,
        pooler: bool = True,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"heads {heads} must divide width {width}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width)
        self.segments = nn.Embedding(segments, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(width, heads, hidden, dropout) for _ in range(layers))
        self.pooler = nn.Sequential(nn.Linear(width, width), nn.Tanh()) if pooler else None
        self.apply(_initialise)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states (batch, sequence, width) or, with a pooler, the pooled one (batch, width).

        Args:
            input_ids: (batch, sequence), int64.
            attention_mask: (batch, sequence), zero or false where a token is padding; all tokens count by default.
            token_type_ids: (batch, sequence), the segment of each token; all are of segment 0 by default.

        Raises:
            ValueError: the sequences are longer than `positions`.
        """
        check_length(input_ids, self.positions.num_embeddings)
        segments = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        x = self.tokens(input_ids) + self.segments(segments)
        x = x + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.dropout(self.norm(x))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        result: Tensor = x if self.pooler is None else self.pooler(x[:, 0])
        return result


class BertForMaskedLM(TokenModel):
    """Tokens (batch, sequence) → logits (batch, sequence, vocabulary); the head's matrix is the token embedding (tied).

    The encoder has no pooler, which this task does not train.

    Args:
        layers, width, heads, hidden: layers, width of a token, attention heads, width of the MLP.
        vocabulary: number of tokens.
        positions: the longest sequence.
        segments: number of segments.
        sequence: length of example inputs; `positions` by default.
        dropout: on embeddings, attention weights, and the results of attention and MLP.
        mask_token: the token that stands for a masked one in example inputs with labels.

    Raises:
        ValueError: `heads` does not divide `width`, or `mask_token` is not in the vocabulary.
    """

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        hidden: int = 3072,
        *,
        vocabulary: int = 30522,
        positions: int = 512,
        segments: int = 2,
        sequence: int | None = None,
        dropout: float = 0.1,
        mask_token: int = 103,
    ) -> None:
        super().__init__(vocabulary, positions if sequence is None else sequence)
        if not 0 <= mask_token < vocabulary:
            raise ValueError(f"mask_token {mask_token} is not in a vocabulary of {vocabulary}")
        self.mask_token = mask_token
        self.encoder = Encoder(
            layers,
            width,
            heads,
            hidden,
            vocabulary=vocabulary,
            positions=positions,
            segments=segments,
            dropout=dropout,
            pooler=False,
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=1e-12))
        self.transform.apply(_initialise)
        self.head = nn.Linear(width, vocabulary)
        self.head.weight = self.encoder.tokens.weight
        nn.init.zeros_(self.head.bias)

    def training_inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Mask 15 % of the tokens, and the first one of each sequence so that there always is one; label only these."""
        masked = torch.rand(input_ids.shape, device=input_ids.device) < 0.15
        masked[:, 0] = True
        return {
            "input_ids": input_ids.masked_fill(masked, self.mask_token),
            "labels": input_ids.masked_fill(~masked, IGNORED),
        }

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits or, with labels (batch, sequence), the mean loss over labels that are not -100.

        The other arguments, and ValueError: see `Encoder.forward`.
        """
        logits: Tensor = self.head(self.transform(self.encoder(input_ids, attention_mask, token_type_ids)))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.02, a=-0.04, b=0.04)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
