"""More loops in which features meet: optimizers that hooks of parameters step in backward, with something else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.pairs import Checkpointed, WithLoss
from benchmarks.loops.user import BATCH, STEPS, WIDTH, Net, User, adamw, entropy, loop


def steps_in_backward(model: nn.Module, make: Callable[..., Any] = torch.optim.AdamW) -> list[torch.optim.Optimizer]:
    """Give each parameter an optimizer of its own, which steps as the gradient is there, and drops it."""
    own = {p: make([p], 1e-3) for p in model.parameters() if p.requires_grad}

    def step(p: torch.Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in own:
        p.register_post_accumulate_grad_hook(step)
    return list(own.values())


def hooked(user: User, model: nn.Module, rows: Sequence[int] = (BATCH,)) -> Iterator[None]:
    """Train by the model's own loss, on batches of these sizes in turn, with parameters that step in backward."""
    call = user.compile(model, steps_in_backward(model))
    for number in range(STEPS):
        x, y = user.data(number, rows[number % len(rows)])
        loss = call(x, y).loss
        loss.backward()
        user.note(loss)
        yield


@loop
def hooked_generator(user: User) -> Iterator[None]:
    """A generator whose optimizer steps in backward, a discriminator whose does not; one budget."""
    generator, critic = Net(classes=WIDTH), Net(classes=1)
    own, stepper = steps_in_backward(generator), adamw(critic)
    make, judge = user.compile([generator, critic], [*own, stepper])
    for number in range(STEPS):
        real, noise = user.data(number)[0], user.data(100 + number)[0]
        fake = make(noise)
        stepper.zero_grad()
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        loss.backward()
        stepper.step()
        user.note(loss)
        critic.requires_grad_(False)
        F.softplus(-judge(fake)).mean().backward()
        critic.requires_grad_(True)
        yield


@loop
def hooks_and_loss_alone(user: User) -> Iterator[None]:
    yield from hooked(user, WithLoss())


@loop
def hooks_and_average(user: User) -> Iterator[None]:
    """An average of weights that a hook steps, evaluated every third step."""
    model = WithLoss()
    average = copy.deepcopy(model)
    call = user.compile(model, steps_in_backward(model, torch.optim.SGD))
    for number in range(STEPS):
        x, y = user.data(number)
        call(x, y).loss.backward()
        with torch.no_grad():
            for mine, his in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(his, 0.1)
            if number % 3 == 2:
                user.note(average(x, y).loss)
        yield


@loop
def hooks_and_heads_in_turn(user: User) -> Iterator[None]:
    """Two heads, of which each step's loss uses one; each parameter steps in backward."""
    model = Net(2)
    call = user.compile(model, steps_in_backward(model))
    for number in range(STEPS):
        x, y = user.data(number)
        loss = F.cross_entropy(call(x)[number % 2], y)
        loss.backward()
        user.note(loss)
        yield


@loop
def hooks_and_lengths(user: User) -> Iterator[None]:
    yield from hooked(user, WithLoss(), (BATCH, BATCH // 2, BATCH * 3 // 4))


@loop
def hooks_and_unfreezing(user: User) -> Iterator[None]:
    """A body that is frozen for four steps; what steps its parameters in backward comes then."""
    model = Net()
    model.body.requires_grad_(False)
    call = user.compile(model, steps_in_backward(model))
    for number in range(STEPS):
        if number == 4:
            model.body.requires_grad_(True)
            steps_in_backward(model.body)
        x, y = user.data(number)
        loss = entropy(call(x), x, y)
        loss.backward()
        user.note(loss)
        yield


@loop
def hooks_and_checkpoints(user: User) -> Iterator[None]:
    yield from hooked(user, Checkpointed())
