"""Loops that hold more than one model and its step: teachers, averages, queues, copies of weights, cached data."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, CLASSES, STEPS, WIDTH, Net, User, entropy, loop


class Wide(nn.Module):
    """A model with more weights than activations: what loops hold beside another one."""

    def __init__(self, width: int = 384, classes: int = CLASSES) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


@loop
def frozen_teacher(user: User) -> Iterator[None]:
    teacher = Wide().requires_grad_(False)
    model = Net()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        out = call(x)
        loss = entropy(out, x, y) + F.kl_div(out.log_softmax(-1), target, reduction="batchmean")
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        yield


@loop
def average_of_wide(user: User) -> Iterator[None]:
    model = Wide()
    stepper, call = user.with_adamw(model)
    mean: dict[str, torch.Tensor] = {}
    for x, y in user.batches():
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        stepper.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                mean[name] = value.clone() if name not in mean else mean[name].lerp_(value, 0.1)
        yield


@loop
def momentum_encoder_and_queue(user: User) -> Iterator[None]:
    model = Net(classes=WIDTH)
    keys, queue = copy.deepcopy(model).requires_grad_(False), F.normalize(torch.randn(4096, WIDTH), dim=-1)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, _ = user.data(number)
        with torch.no_grad():
            for kept, new in zip(keys.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.01)
            key = F.normalize(keys(x + 0.1), dim=-1)
        query = F.normalize(call(x), dim=-1)
        logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ queue[:64].t()], -1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        queue = torch.cat([key, queue[: -len(key)]])
        yield


@loop
def cached_data(user: User) -> Iterator[None]:
    x, y = user.data(0, 16 * BATCH)
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        rows = torch.arange(number * BATCH, (number + 1) * BATCH)
        stepper.zero_grad()
        entropy(call(x[rows]), x, y[rows]).backward()
        stepper.step()
        yield


@loop
def batches_in_a_list(user: User) -> Iterator[None]:
    """The data set is a list of batches, each a tensor of its own."""
    batches, model = list(user.batches()), Net()
    stepper, call = user.with_adamw(model)
    for x, y in batches:
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        stepper.step()
        yield


@loop
def sharpness_aware(user: User) -> Iterator[None]:
    model = Wide()
    stepper = torch.optim.SGD(model.parameters(), 0.1)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        entropy(call(x), x, y).backward()
        with torch.no_grad():
            moves = [0.05 * each.grad for each in model.parameters() if each.grad is not None]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        stepper.step()
        stepper.zero_grad()
        yield


@loop
def closure(user: User) -> Iterator[None]:
    model = Net()
    stepper = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    call = user.compile(model, stepper)
    for x, y in user.batches():

        def again(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            stepper.zero_grad()
            loss = entropy(call(x), x, y)
            loss.backward()
            return loss

        stepper.step(again)
        yield


@loop
def retained_twice(user: User) -> Iterator[None]:
    model = Net()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepper.zero_grad()
        out = call(x)
        entropy(out, x, y).backward(retain_graph=True)
        (0.1 * out.square().mean()).backward(retain_graph=True)
        (0.1 * out.abs().mean()).backward()
        stepper.step()
        yield


@loop
def grows_by_a_batch_a_step(user: User) -> Iterator[None]:
    model = Net()
    stepper, call = user.with_adamw(model)
    replayed: list[torch.Tensor] = []
    for x, y in user.batches():
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        stepper.step()
        replayed.append(x.clone())
        yield


@loop
def eager_encoder(user: User) -> Iterator[None]:
    encoder, model = Net(classes=WIDTH), Net()
    stepper = torch.optim.AdamW([*encoder.parameters(), *model.parameters()], 1e-3)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        stepper.zero_grad()
        entropy(call(encoder(x)), x, y).backward()
        stepper.step()
        yield


@loop
def eager_head(user: User) -> Iterator[None]:
    model, head = Net(classes=WIDTH), Wide()
    stepper = torch.optim.AdamW([*head.parameters(), *model.parameters()], 1e-3)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        stepper.zero_grad()
        entropy(head(call(x)), x, y).backward()
        stepper.step()
        yield


@loop
def functional_teacher(user: User) -> Iterator[None]:
    model = Net()
    stepper, call = user.with_adamw(model)
    mean = {name: value.detach().clone() for name, value in model.named_parameters()}
    for x, y in user.batches():
        with torch.no_grad():
            target = torch.func.functional_call(model, mean, (x,)).softmax(-1)
        out = call(x)
        stepper.zero_grad()
        (entropy(out, x, y) + (out.softmax(-1) - target).square().mean()).backward()
        stepper.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                mean[name].lerp_(value, 0.1)
        yield
