"""Loops of tasks as trained in practice: calls without gradients within a step, what a loop keeps through it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, CLASSES, STEPS, WIDTH, Net, User, adamw, entropy, loop, stepped


class ActorCritic(nn.Module):
    """What to do, and what is to be expected."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = Net(classes=WIDTH), nn.Linear(WIDTH, 6), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.body(x).relu()
        return self.policy(found).log_softmax(-1), self.value(found).squeeze(-1)


@loop
def advantage_of_n_steps(user: User) -> Iterator[None]:
    """Four calls before one backward, and one without gradients before it, for what comes behind the last of them."""
    model = ActorCritic()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        states = [user.data(5 * number + part, BATCH // 4)[0] for part in range(5)]
        found = [call(state) for state in states[:4]]
        with torch.no_grad():
            expected = call(states[4])[1]
        loss = torch.zeros(())
        for part, (logs, value) in reversed(list(enumerate(found))):
            expected = 0.1 * states[part][:, 0] + 0.9 * expected
            more = expected - value
            chosen = logs[torch.arange(len(logs)), user.data(5 * number + part, len(logs))[1] % 6]
            loss = (
                loss
                + more.square().mean()
                - (chosen * more.detach()).mean()
                + 0.01 * (logs.exp() * logs).sum(-1).mean()
            )
        stepped(user, stepper, loss)
        yield


class Denoiser(nn.Module):
    """Of noisy rows, and of what it has made of them before."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.body = nn.Linear(2 * WIDTH, WIDTH), Net(classes=WIDTH)

    def forward(self, x: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
        return self.body(self.both(torch.cat([x, known], -1)))


@loop
def self_conditioning(user: User) -> Iterator[None]:
    """In half of the steps the model is called without gradients first, and given what it returned."""
    model, coin = Denoiser(), random.Random(3)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, noise = user.data(number)[0], user.data(100 + number)[0]
        known = torch.zeros_like(x)
        if coin.random() < 0.5:
            with torch.no_grad():
                known = call(x + noise, known)
        stepped(user, stepper, F.mse_loss(call(x + noise, known), noise))
        yield


@loop
def evaluates_beside_gradients(user: User) -> Iterator[None]:
    """Micro-batches, and an evaluation in the middle of them, when gradients are there."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        for part in range(4):
            x, y = user.data(4 * number + part, BATCH // 2)
            (entropy(call(x), x, y) / 4).backward()
            if part == 1:
                call.eval()
                with torch.inference_mode():
                    x, y = user.data(99)
                    user.note(entropy(call(x), x, y))
                call.train()
        stepper.step()
        stepper.zero_grad()
        yield


class Boxes(nn.Module):
    """Detections of a picture, in a list of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net(classes=WIDTH)
        self.box, self.kind = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        found = self.body(x)
        return [{"boxes": self.box(found).sigmoid(), "kinds": self.kind(found)}]


@loop
def distances_in_a_variable(user: User) -> Iterator[None]:
    """A detector, whose distances from all aims to all boxes stay in a variable until the next step makes its own."""
    model = Boxes()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        found = call(x)[0]
        distances = torch.cdist(found["boxes"], user.data(100 + number, 256)[0][:, :4].sigmoid(), p=1)
        stepped(user, stepper, distances.min(1).values.mean() + F.cross_entropy(found["kinds"], y % 8))
        yield


@loop
def crops_of_two_sizes(user: User) -> Iterator[None]:
    """DINO: a teacher sees the large crops, the model all of them, one by one."""
    model = Net()
    teacher = copy.deepcopy(model).requires_grad_(False)
    stepper, call = user.with_adamw(model)
    centre = torch.zeros(1, CLASSES)
    for number in range(STEPS):
        large = [user.data(6 * number + part, BATCH // 2)[0] for part in range(2)]
        small = [user.data(6 * number + 2 + part, BATCH // 8)[0] for part in range(4)]
        with torch.no_grad():
            aims = [teacher(x) for x in large]
        logs = [(call(x) / 0.1).log_softmax(-1) for x in (*large, *small)]
        loss = torch.zeros(())
        for place, aim in enumerate(aims):
            wanted = ((aim - centre) / 0.04).softmax(-1)
            others = [each for other, each in enumerate(logs) if other != place]
            loss = loss - sum((wanted[: len(each)] * each).sum(-1).mean() for each in others) / 10
        stepped(user, stepper, loss)
        with torch.no_grad():
            centre.lerp_(torch.cat(aims).mean(0, keepdim=True), 0.1)
            torch._foreach_lerp_(list(teacher.parameters()), [each.detach() for each in model.parameters()], 0.01)
        yield


@loop
def integrated_by_runge_kutta(user: User) -> Iterator[None]:
    """A differential equation: twelve calls, each with what the one before has returned."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Net(classes=WIDTH))
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, aim = user.data(number, BATCH // 4)[0], user.data(100 + number, BATCH // 4)[0]
        for _ in range(3):
            one = call(x)
            two = call(x + one / 6)
            three = call(x + two / 6)
            x = x + (one + 2 * two + 2 * three + call(x + three / 3)) / 18
        stepped(user, stepper, F.mse_loss(x, aim))
        yield


@loop
def adversaries_by_own_gradients(user: User) -> Iterator[None]:
    """TRADES: inputs go up the gradient of the model's own call, then it is trained on both."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, BATCH // 2)
        call.eval()
        with torch.no_grad():
            usual = call(x).softmax(-1)
        other = x + 1e-3 * user.data(100 + number, BATCH // 2)[0]
        for _ in range(2):
            other.requires_grad_(True)
            (slope,) = torch.autograd.grad(F.kl_div(call(other).log_softmax(-1), usual, reduction="sum"), [other])
            other = (other.detach() + 0.01 * slope.sign()).clamp(x - 0.05, x + 0.05)
        call.train()
        out = call(x)
        apart = F.kl_div(call(other).log_softmax(-1), out.softmax(-1), reduction="batchmean")
        stepped(user, stepper, F.cross_entropy(out, y) + 3 * apart)
        yield


@loop
def two_optimizers_of_one_model(user: User) -> Iterator[None]:
    """Matrices are stepped by one optimizer with momentum, all else by another; only one is told of."""
    model = Net()
    matrices = [each for each in model.parameters() if each.ndim > 1]
    one = torch.optim.SGD(matrices, 0.02, momentum=0.9)
    two = torch.optim.AdamW([each for each in model.parameters() if each.ndim == 1], 1e-3)
    call = user.compile(model, one)
    for x, y in user.batches():
        loss = entropy(call(x), x, y)
        loss.backward()
        one.step()
        two.step()
        one.zero_grad()
        two.zero_grad()
        user.note(loss)
        yield


@loop
def average_swapped_in(user: User) -> Iterator[None]:
    """In every second step an average of the weights takes their place for an evaluation of more rows."""
    model = Net()
    stepper, call = user.with_adamw(model)
    mean = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number in range(STEPS):
        x, y = user.data(number)
        stepped(user, stepper, F.cross_entropy(call(x), y, label_smoothing=0.1))
        for name, value in model.state_dict().items():
            mean[name].lerp_(value, 0.05)
        if number % 2:
            own = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(mean)
            with torch.inference_mode():
                user.note(entropy(call(user.data(99, 2 * BATCH)[0]), x, user.data(99, 2 * BATCH)[1]))
            model.load_state_dict(own)
        yield


@loop
def masters_of_a_half_model(user: User) -> Iterator[None]:
    """The model is of bfloat16; its weights' copies in full precision are what is stepped."""
    model = Net().to(torch.bfloat16)
    masters = nn.ParameterList(each.detach().float() for each in model.parameters())
    user.models.append(masters)
    stepper, call = adamw(masters), user.compile(model)
    for x, y in user.batches():
        loss = F.cross_entropy(call(x.bfloat16()).float(), y)
        (loss * 128).backward()
        for each, master in zip(model.parameters(), masters, strict=True):
            assert each.grad is not None
            master.grad, each.grad = each.grad.float() / 128, None
        stepper.step()
        stepper.zero_grad()
        with torch.no_grad():
            for each, master in zip(model.parameters(), masters, strict=True):
                each.copy_(master)
        user.note(loss)
        yield
