"""What an evaluated batch norm computes, channel by channel: one product and one sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx


def scale_and_shift(
    norm: fx.Node, read: Callable[[fx.Node], torch.Tensor], added: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The vectors s and t for which a batch norm of x + added is s·x + t: s = gamma / sqrt(variance + eps).

    Args:
        norm: a call of `aten._native_batch_norm_legit_no_training`.
        read: the values of one of its vectors, of shape (C,), in float64; absent ones are not asked for.
        added: vectors of shape (C,) in float64 that come on top of what is normalised: biases of the layer before.

    Returns:
        s and t of shape (C,), in float64.
    """
    operands: Any = norm.args[1:]
    gamma, beta, mean, variance, _, epsilon = operands
    root = torch.sqrt(read(variance) + float(epsilon))
    scale = root.reciprocal() if gamma is None else read(gamma) / root
    centre = -read(mean)
    for vector in added:
        centre = centre + vector
    shift = centre * scale
    return scale, shift if beta is None else shift + read(beta)
