"""What a call has to do with its model's training."""

from __future__ import annotations

import dataclasses

from torch import nn


@dataclasses.dataclass(frozen=True)
class CallRole:
    """The part of one call.

    Attributes:
        trains: whether it is one of a training step, though some of its graphs need no gradients.
        to_be_trained: whether it is one of inference, of a model that is likely to be trained.
        trained_beside: whether that is certain: an optimizer was given, or steps of training have run. What passes make
            of such weights would be out of date after each step, and lie beside the next ones until then.
    """

    trains: bool = False
    to_be_trained: bool = False
    trained_beside: bool = False


def role_of(model: nn.Module, *, gradients: bool, likely: bool, certain: bool) -> CallRole:
    """The role of a call.

    Args:
        model: whose call it is; there is nothing to train without a parameter that requires gradients.
        gradients: whether autograd records it.
        likely: whether the model was compiled to be trained.
        certain: whether it is known to be: it has an optimizer, or has run steps of training.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return CallRole()
    return CallRole(trains=True) if gradients else CallRole(to_be_trained=likely, trained_beside=certain)
