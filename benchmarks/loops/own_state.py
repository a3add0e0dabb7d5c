"""Loops whose models hold state of their own: counts in objects, generators of random numbers, queues of what was."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Iterator

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
