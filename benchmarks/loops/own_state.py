"""Loops whose models hold state or functions of their own: counts in objects, generators, queues, own derivatives."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.loops.user import Net, User, entropy, loop, stepped


class Counting(Net):
    """Counts its calls in an object, in a part that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = types.SimpleNamespace(calls=0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.calls += 1
        return x / self.seen.calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self._scaled(x))


class Noisy(Net):
    """Draws from the loop's generator, and from one of Python's that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draw = random.Random(0)

    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(x.shape, generator=generator)
        return super().forward(x + 0.1 * self.draw.random() * noise)


class Recent(Net):
    """Subtracts what the last three batches were on average."""

    def __init__(self) -> None:
        super().__init__()
        self.means = collections.deque[torch.Tensor](maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.means.append(x.mean(0))
        return super().forward(x - sum(self.means) / len(self.means))


class _Swish(torch.autograd.Function):
    """Saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, slope)
        return x * (slope * x).sigmoid()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (gradient,), (x, slope) = gradients, ctx.saved_tensors
        gate = (slope * x).sigmoid()
        steep = gate * (1 - gate)
        of_slope = (gradient * x * x * steep).sum().reshape(slope.shape)
        return gradient * (gate + slope * x * steep), of_slope


class OwnDerivatives(Net):
    """Activations with a backward of their own, by a slope that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + _Swish.apply(layer(x), self.slope)  # type: ignore[no-untyped-call]


def _trained(user: User, model: nn.Module, *more: torch.Generator) -> Iterator[None]:
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepped(user, stepper, entropy(call(x, *more), x, y))
        yield


@loop
def counts_in_an_object(user: User) -> Iterator[None]:
    return _trained(user, Counting())


@loop
def own_generators(user: User) -> Iterator[None]:
    return _trained(user, Noisy(), torch.Generator().manual_seed(0))


@loop
def queue_of_means(user: User) -> Iterator[None]:
    return _trained(user, Recent())


@loop
def own_derivatives(user: User) -> Iterator[None]:
    return _trained(user, OwnDerivatives())
