"""Losses over several calls, or over what earlier steps have left: pairs, triplets, queues, averages of weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, STEPS, WIDTH, Net, User, loop, stepped


class Encoder(nn.Module):
    """A body, and what it is projected to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(classes=WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.net(x), dim=-1)


@loop
def moco(user: User) -> Iterator[None]:
    model = Encoder()
    keys = copy.deepcopy(model).requires_grad_(False)
    keys.register_buffer("queue", F.normalize(torch.randn(4096, WIDTH), dim=-1))
    keys.register_buffer("at", torch.zeros((), dtype=torch.long))
    stepper = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        x, _ = user.data(number)
        query = call(x)
        with torch.no_grad():
            for kept, new in zip(keys.parameters(), model.parameters(), strict=True):
                kept.mul_(0.99).add_(new, alpha=0.01)
            key = keys(x + 0.1 * user.data(100 + number)[0])
        positive = (query * key).sum(-1, keepdim=True)
        negative = query @ keys.queue[:256].clone().t()
        loss = F.cross_entropy(torch.cat([positive, negative], 1) / 0.2, torch.zeros(len(x), dtype=torch.long))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        at = int(keys.at)
        keys.queue[at : at + len(key)] = key
        keys.at.fill_((at + len(key)) % len(keys.queue))
        user.note(loss)
        yield


@loop
def gathered_queue(user: User) -> Iterator[None]:
    model = Encoder()
    stepper, call = user.with_adamw(model)
    gathered: list[torch.Tensor] = []
    for number in range(STEPS):
        x, _ = user.data(number)
        z = call(x)
        every = torch.cat([z, *gathered])
        loss = F.cross_entropy(z @ every.t() / 0.1, torch.arange(len(z)))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        gathered = [z.detach(), *gathered][:3]
        user.note(loss)
        yield


@loop
def siamese(user: User) -> Iterator[None]:
    model = Encoder()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        (x, y), (other, label) = user.data(2 * number), user.data(2 * number + 1)
        distance = F.pairwise_distance(call(x), call(other))
        same = (y % 2 == label % 2).float()
        loss = (same * distance.square() + (1 - same) * F.relu(1 - distance).square()).mean()
        stepped(user, stepper, loss)
        yield


@loop
def triplet(user: User) -> Iterator[None]:
    model = Encoder()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        anchor, positive, negative = (call(user.data(3 * number + part)[0]) for part in range(3))
        loss = F.triplet_margin_loss(anchor, positive, negative)
        stepped(user, stepper, loss)
        yield


@loop
def byol(user: User) -> Iterator[None]:
    model = Encoder()
    target = copy.deepcopy(model).requires_grad_(False)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        one, two = user.data(2 * number)[0], user.data(2 * number + 1)[0]
        with torch.no_grad():
            wanted = target(two), target(one)
        loss = sum((2 - 2 * (call(x) * z).sum(-1)).mean() for x, z in zip((one, two), wanted, strict=True))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        with torch.no_grad():
            for kept, new in zip(target.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)
        user.note(loss)
        yield


@loop
def distillation_of_features(user: User) -> Iterator[None]:
    teacher, model = Net(2).requires_grad_(False).eval(), Net(2)
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        with torch.no_grad():
            logits, features = teacher(x)
        out, own = call(x)
        soft = F.kl_div((out / 2).log_softmax(-1), (logits / 2).softmax(-1), reduction="batchmean")
        loss = F.cross_entropy(out, y) + soft + F.mse_loss(own, features)
        stepped(user, stepper, loss)
        yield


@loop
def large_teacher(user: User) -> Iterator[None]:
    teacher = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 96))
    teacher.requires_grad_(False)
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, _ = user.data(number, 2 * BATCH)
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.kl_div(call(x).log_softmax(-1), target, reduction="batchmean")
        stepped(user, stepper, loss)
        yield
