"""What the reference models share: example inputs, and the losses that they are trained with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # a label that counts for nothing in the loss: the default of F.cross_entropy


class ImageModel(nn.Module):
    """A model of square images: `forward(images, labels=None)`.

    Subclasses define `logits`. Without labels forward returns the logits, class scores on dimension 1; with labels the
    mean cross-entropy, a scalar.

    Attributes:
        channels: channels of an image.
        classes: number of classes.
        resolution: default height and width of an image, in pixels.
    """

    def __init__(self, channels: int, classes: int, resolution: int) -> None:
        super().__init__()
        self.channels, self.classes, self.resolution = channels, classes, resolution

    def logits(self, images: Tensor) -> Tensor:
        """Return the class scores (batch, classes, …) of images (batch, channels, height, width)."""
        raise NotImplementedError

    def forward(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the logits or, with labels, the training loss (a scalar)."""
        logits = self.logits(images)
        return logits if labels is None else F.cross_entropy(logits, labels)

    def label_shape(self, batch: int, resolution: int) -> tuple[int, ...]:
        """The shape of the labels: one per image."""
        return (batch,)

    def example_inputs(
        self, batch: int = 2, *, resolution: int | None = None, labels: bool = False
    ) -> dict[str, Tensor]:
        """Random keyword arguments for forward, on the device and in the dtype of the parameters.

        Args:
            batch: number of images.
            resolution: height and width in pixels; the model's own by default.
            labels: whether to add random `labels` (int64), so that forward returns the loss.

        Raises:
            ValueError: a size is below one.
        """
        size = self.resolution if resolution is None else resolution
        _check_positive(batch=batch, resolution=size)
        parameter = next(self.parameters())
        images = torch.randn(batch, self.channels, size, size, device=parameter.device, dtype=parameter.dtype)
        inputs = {"images": images}
        if labels:
            inputs["labels"] = torch.randint(self.classes, self.label_shape(batch, size), device=parameter.device)
        return inputs


class TokenModel(nn.Module):
    """A model of token sequences: `forward(input_ids, labels=None)`, logits (batch, sequence, vocabulary) or a scalar.

    Attributes:
        vocabulary: number of tokens.
        sequence: default length of a sequence.
    """

    def __init__(self, vocabulary: int, sequence: int) -> None:
        super().__init__()
        self.vocabulary, self.sequence = vocabulary, sequence

    def training_inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """The inputs of a training step on these tokens: by default the tokens are their own labels."""
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    def example_inputs(self, batch: int = 2, *, sequence: int | None = None, labels: bool = False) -> dict[str, Tensor]:
        """Random keyword arguments for forward (int64), on the device of the parameters.

        Args:
            batch: number of sequences.
            sequence: tokens in a sequence; the model's own default by default.
            labels: whether to add `labels`, so that forward returns the loss.

        Raises:
            ValueError: a size is below one.
        """
        length = self.sequence if sequence is None else sequence
        _check_positive(batch=batch, sequence=length)
        input_ids = torch.randint(self.vocabulary, (batch, length), device=next(self.parameters()).device)
        return self.training_inputs(input_ids) if labels else {"input_ids": input_ids}


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, sequence, vocabulary) at each position against the label one further on.

    Raises:
        ValueError: sequences of one token have no next token.
    """
    if labels.shape[1] < 2:
        raise ValueError("a next-token loss needs sequences of two tokens or more")
    # The labels are shifted, not the logits: these are the largest tensor, and a shifted view of them would be copied.
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), shifted.flatten())


def check_length(input_ids: Tensor, longest: int) -> None:
    """Raise ValueError when sequences are longer than the table of learned positions."""
    if input_ids.shape[1] > longest:
        raise ValueError(f"sequences of {input_ids.shape[1]} tokens, but the model has {longest} positions")


def _check_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")
