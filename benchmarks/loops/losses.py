"""Losses that a loop computes itself, and what it keeps of outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import CLASSES, Net, User, entropy, loop, plain


@loop
def cross_entropy(user: User) -> Iterator[None]:
    return plain(user, entropy)


@loop
def sum_of_outputs(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: out.sum())


@loop
def mean_of_squares(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.mse_loss(out, x.new_zeros(out.shape)))


@loop
def label_smoothing(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out, y, label_smoothing=0.1))


@loop
def temperature(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: -(out / 2).softmax(-1).log().gather(1, y[:, None]).mean())


@loop
def focal(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logs = out.log_softmax(-1)
        return -((1 - logs.exp()) ** 2 * logs * F.one_hot(y, CLASSES).float()).sum(-1).mean()

    return plain(user, loss)


@loop
def three_losses(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(out, x, y) + 0.1 * out.square().mean() + 0.1 * (out.softmax(-1) * out.log_softmax(-1)).sum()

    return plain(user, loss)


@loop
def double_precision(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out.double(), y))


@loop
def contrastive(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = F.normalize(out, dim=-1)
        return F.cross_entropy(z @ z.t() / 0.1, torch.arange(len(z)))

    return plain(user, loss, model=Net(classes=24))


@loop
def two_heads(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: entropy(out[0], x, y) + out[1].tanh().square().mean(), model=Net(2))


@loop
def distillation(user: User) -> Iterator[None]:
    teacher = Net().requires_grad_(False)

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        soft = F.kl_div((out / 2).log_softmax(-1), (target / 2).softmax(-1), reduction="batchmean")
        return soft + entropy(out, x, y)

    return plain(user, loss)


@loop
def head_outside(user: User) -> Iterator[None]:
    head = nn.Linear(24, 256)
    return plain(user, lambda out, x, y: entropy(head(out), x, y), model=Net(classes=24))


@loop
def autocast(user: User) -> Iterator[None]:
    return plain(user, lambda out, x, y: F.cross_entropy(out.float(), y), autocast=True)


@loop
def keeps_probabilities(user: User) -> Iterator[None]:
    held: dict[str, Any] = {}

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held["probabilities"], held["logits"] = out.softmax(-1), out.detach().clone()
        held["right"] = out.argmax(-1) == y
        return entropy(out, x, y)

    return plain(user, loss)


@loop
def keeps_last_two_outputs(user: User) -> Iterator[None]:
    held: list[Any] = []

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        held[:] = [*held[-1:], out.detach()]
        return entropy(out, x, y)

    return plain(user, loss)


@loop
def grows_after_two_steps(user: User) -> Iterator[None]:
    calls = [0]

    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        more = (out.softmax(-1) * out.log_softmax(-1)).sum() if calls[0] > 2 else 0.0
        return entropy(out, x, y) + more

    return plain(user, loss)


@loop
def loss_inside(user: User) -> Iterator[None]:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).log_softmax(-1)[:, 0].mean().neg()

    return plain(user, lambda out, x, y: out, model=Whole())


@loop
def two_backwards(user: User) -> Iterator[None]:
    model = Net(2)
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepper.zero_grad()
        first, second = call(x)
        entropy(first, x, y).backward(retain_graph=True)
        second.square().mean().backward()
        stepper.step()
        yield


@loop
def gradients_by_hand(user: User) -> Iterator[None]:
    model = Net()
    call, parameters = user.compile(model), list(model.parameters())
    for x, y in user.batches():
        found = torch.autograd.grad(entropy(call(x), x, y), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, found, strict=True):
                parameter.sub_(gradient, alpha=1e-2)
        yield


@loop
def retained_gradient(user: User) -> Iterator[None]:
    def loss(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out.retain_grad()
        return entropy(out, x, y)

    return plain(user, loss)
