"""Loops that were written after the rest, to find what the rest had not: each by a way of training of its own."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.loops.user import (
    BATCH,
    CLASSES,
    DEPTH,
    STEPS,
    WIDTH,
    Net,
    User,
    by_closures,
    entropy,
    loop,
    stepped,
)


@loop
def two_teachers(user: User) -> Iterator[None]:
    """Distillation from the mean of two teachers that nobody compiles, beside the labels."""
    model, teachers = Net(), [Net().eval().requires_grad_(False) for _ in range(2)]
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        with torch.no_grad():
            aim = sum(teacher(x).softmax(-1) for teacher in teachers) / 2
        out = call(x)
        loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(-1), aim, reduction="batchmean")
        stepped(user, stepper, loss)
        yield


@loop
def memory_bank(user: User) -> Iterator[None]:
    """Contrast with a ring of features of earlier batches, written in place."""
    model = Net(classes=32)
    stepper, call = user.with_adamw(model)
    bank, place = F.normalize(torch.randn(2048, 32, generator=torch.Generator().manual_seed(1)), dim=-1), 0
    for number in range(STEPS):
        x, _ = user.data(number, 256)
        one, two = F.normalize(call(x), dim=-1), F.normalize(call(x + 0.1), dim=-1)
        logits = torch.cat([(one * two).sum(-1, keepdim=True), one @ bank.t()], -1) / 0.1
        stepped(user, stepper, F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long)))
        bank[place : place + len(x)] = two.detach()
        place = (place + len(x)) % len(bank)
        yield


@loop
def penalty_on_inputs(user: User) -> Iterator[None]:
    """A penalty on the inputs' gradients, of the model itself: the loss of the compiled one comes beside it."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, 128)
        leaf = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(leaf), y), leaf, create_graph=True)
        stepped(user, stepper, entropy(call(x), x, y) + slope.square().sum())
        yield


@loop
def mixup(user: User) -> Iterator[None]:
    """A call on the batch, and one on its mixture with itself."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, 256)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(number))
        rate = 0.3
        mixed = call(rate * x + (1 - rate) * x[order])
        loss = rate * F.cross_entropy(mixed, y) + (1 - rate) * F.cross_entropy(mixed, y[order])
        stepped(user, stepper, loss + F.cross_entropy(call(x), y))
        yield


class Picture(nn.Module):
    """Convolutions over pictures of any size."""

    def __init__(self) -> None:
        super().__init__()
        parts = [(nn.Conv2d(3 if not i else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU()) for i in range(4)]
        self.body, self.head = nn.Sequential(*itertools.chain(*parts)), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


@loop
def changing_resolution(user: User) -> Iterator[None]:
    """The largest pictures first, then smaller ones in turn."""
    model = Picture()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        side = (24, 16, 20)[number % 3]
        x = torch.randn(8, 3, side, side, generator=torch.Generator().manual_seed(number))
        stepped(user, stepper, F.cross_entropy(call(x), user.data(number, 8)[1]))
        yield


@loop
def average_evaluated_now_and_then(user: User) -> Iterator[None]:
    """An average of weights, which evaluates a larger batch in every fourth step."""
    model = Net()
    mean = copy.deepcopy(model).requires_grad_(False).eval()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), [each.detach() for each in model.parameters()], 0.1)
            if number % 4 == 3:
                user.note(entropy(mean(user.data(99, 2 * BATCH)[0]), x, user.data(99, 2 * BATCH)[1]))
        yield


@loop
def surgery_by_grad(user: User) -> Iterator[None]:
    """Gradients of two tasks of one call by `autograd.grad`, which are then projected and set."""
    model = Net(2)
    stepper, call = user.with_adamw(model)
    weights = list(model.parameters())
    for x, y in user.batches():
        one, two = call(x)
        losses = F.cross_entropy(one, y), F.cross_entropy(two, (y + 1) % CLASSES)
        first = torch.autograd.grad(losses[0], weights, retain_graph=True, allow_unused=True)
        second = torch.autograd.grad(losses[1], weights, allow_unused=True)
        for weight, *both in zip(weights, first, second, strict=True):
            a, b = (torch.zeros_like(weight) if each is None else each for each in both)
            weight.grad = a + b - (a * b).sum().clamp(max=0) / (b.square().sum() + 1e-9) * b
        stepper.step()
        user.note(losses[0])
        yield


class Reader(nn.Module):
    """A recurrent layer that begins with the state of the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRU(WIDTH, 48, batch_first=True), nn.Linear(48, CLASSES)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, state = self.inner(x, state)
        return self.head(out), state


@loop
def carried_state(user: User) -> Iterator[None]:
    """Truncated backward: the state goes from step to step, detached."""
    model = Reader()
    stepper, call = user.with_adamw(model)
    state = torch.zeros(1, 16, 48)
    for number in range(STEPS):
        x, y = user.data(number, 256)
        out, state = call(x.view(16, 16, WIDTH), state)
        state = state.detach()
        stepped(user, stepper, F.cross_entropy(out.flatten(0, 1), y))
        yield


@loop
def first_order_meta_learning(user: User) -> Iterator[None]:
    """Reptile: inner steps on the compiled model itself, whose weights then go a part of the way."""
    model = Net()
    call = user.compile(model)
    for number in range(STEPS):
        start = [each.detach().clone() for each in model.parameters()]
        inner = torch.optim.SGD(model.parameters(), 0.05)
        for part in range(3):
            x, y = user.data(3 * number + part)
            inner.zero_grad()
            loss = entropy(call(x), x, y)
            loss.backward()
            inner.step()
        with torch.no_grad():
            for each, before in zip(model.parameters(), start, strict=True):
                each.copy_(before + 0.5 * (each - before))
        user.note(loss)
        yield


@loop
def closure_of_sgd(user: User) -> Iterator[None]:
    """An optimizer of one closure a step, whose loss the loop reads."""
    model = Net()
    stepper = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return by_closures(user, model, stepper)


@loop
def two_pass_sharpness(user: User) -> Iterator[None]:
    """SAM: weights go up their gradient, a second pass there, and back again before the step."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        loss = entropy(call(x), x, y)
        loss.backward()
        with torch.no_grad():
            norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm() + 1e-12
            moves = [each.grad * (0.05 / norm) for each in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        stepper.step()
        stepper.zero_grad()
        user.note(loss)
        yield


@loop
def groups_freeze_midway(user: User) -> Iterator[None]:
    """From the fifth step on the first half is frozen, from the ninth on it is trained again."""
    model = Net()
    stepper = torch.optim.AdamW(
        [{"params": model.body[: DEPTH // 2].parameters()}, {"params": [*model.body[DEPTH // 2 :].parameters()]}], 1e-3
    )
    stepper.add_param_group({"params": model.heads.parameters(), "lr": 1e-2})
    call = user.compile(model, stepper)
    for number in range(STEPS):
        model.body[: DEPTH // 2].requires_grad_(not 4 <= number < 8)
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


class HalfCheckpointed(Net):
    """Every second block is checkpointed by the model itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.body):
            x = checkpoint(self._block, layer, x, use_reentrant=False) if number % 2 else self._block(layer, x)
        return self.heads[0](x)


@loop
def half_checkpointed(user: User) -> Iterator[None]:
    model = HalfCheckpointed()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepped(user, stepper, entropy(call(x), x, y))
        yield


@loop
def activations_logged(user: User) -> Iterator[None]:
    """Hooks keep activations of two layers, whose spread is logged behind the step."""
    model = Net()
    kept: dict[int, torch.Tensor] = {}
    for number in (2, 5):
        model.body[number].register_forward_hook(lambda _, __, out, number=number: kept.update({number: out.detach()}))
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        user.losses.append(sum(each.std().item() for each in kept.values()))
        yield


class Deep(Net):
    """Also returns what its middle layers have made."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        middle = []
        for layer in self.body:
            x = self._block(layer, x)
            middle.append(x)
        return self.heads[0](x), middle[1::3]


@loop
def losses_of_middle_layers(user: User) -> Iterator[None]:
    """Deep supervision by small heads that are not compiled."""
    model, heads = Deep(), nn.ModuleList(nn.Linear(WIDTH, 16) for _ in range(3))
    user.models.append(heads)
    stepper = torch.optim.AdamW([*model.parameters(), *heads.parameters()], 1e-3)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        out, middle = call(x)
        aside = sum(F.cross_entropy(head(each), y % 16) for head, each in zip(heads, middle, strict=True))
        stepped(user, stepper, F.cross_entropy(out, y) + 0.3 * aside)
        yield


@loop
def unfreezes_one_by_one(user: User) -> Iterator[None]:
    """All layers are trained in the first steps, then only the head and a layer, and one more later."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        for place, layer in enumerate(model.body):
            layer.requires_grad_(number < 3 or place >= DEPTH - min(number // 3, 2))
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


@loop
def scaled_half(user: User) -> Iterator[None]:
    """Autocast to bfloat16 with gradients scaled, clipped, and unscaled by hand."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = entropy(call(x), x, y)
        stepper.zero_grad()
        (loss * 1024).backward()
        for each in model.parameters():
            each.grad /= 1024
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        stepper.step()
        user.note(loss)
        yield
