"""Losses and steps that call a model many times, or need derivatives of derivatives."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.contrast import Encoder
from benchmarks.loops.user import BATCH, CLASSES, STEPS, WIDTH, Net, User, adamw, by_closures, entropy, loop, stepped


@loop
def cell_over_time(user: User) -> Iterator[None]:
    """A cell that is called once for each element of a sequence."""
    cell, head = nn.GRUCell(WIDTH, 64), nn.Linear(64, CLASSES)
    user.models.append(head)
    stepper = torch.optim.AdamW([*cell.parameters(), *head.parameters()], 1e-3)
    call = user.compile(cell, stepper)
    for x, y in user.batches():
        h = torch.zeros(len(x), 64)
        for part in range(6):
            h = call(x.roll(part, 1), h)
        stepped(user, stepper, F.cross_entropy(head(h), y))
        yield


@loop
def recurrent_net(user: User) -> Iterator[None]:
    """The same body applied four times, its own outputs its inputs."""
    model, head = Net(classes=WIDTH), nn.Linear(WIDTH, CLASSES)
    user.models.append(head)
    stepper = torch.optim.AdamW([*model.parameters(), *head.parameters()], 1e-3)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        h = x
        for _ in range(4):
            h = x + call(h).tanh()
        stepped(user, stepper, F.cross_entropy(head(h), y))
        yield


@loop
def matching(user: User) -> Iterator[None]:
    """Two calls, and all pairs' similarities both ways."""
    model = Encoder()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        one, two = user.data(2 * number)[0], user.data(2 * number + 1)[0]
        a, b = call(one), call(two)
        logits = a @ b.t() / 0.07
        labels = torch.arange(len(one))
        stepped(user, stepper, (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2)
        yield


@loop
def lbfgs(user: User) -> Iterator[None]:
    """An optimizer that calls its closure several times a step."""
    model = Net()
    stepper = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=4)
    return by_closures(user, model, stepper)


class Critic(nn.Module):
    """One number a row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(x))


@loop
def wgan_gp(user: User) -> Iterator[None]:
    """The generator is compiled; its critic, with a penalty on the critic's gradients, is not."""
    made, judge = Net(classes=WIDTH), Critic()
    user.models.append(judge)
    steppers = adamw(made), adamw(judge)
    call = user.compile(made, steppers[0])
    for number in range(STEPS):
        x, _ = user.data(2 * number)
        real, _ = user.data(2 * number + 1)
        fake = call(x).detach()
        rate = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(number))
        mixed = (rate * real + (1 - rate) * fake).requires_grad_(True)
        (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
        loss = judge(fake).mean() - judge(real).mean() + 10 * (slope.norm(2, dim=1) - 1).square().mean()
        steppers[1].zero_grad()
        loss.backward()
        steppers[1].step()
        lies = -judge(call(x)).mean()
        steppers[0].zero_grad()
        lies.backward()
        steppers[0].step()
        user.note(loss)
        yield


@loop
def critics_in_turn(user: User) -> Iterator[None]:
    """Three steps of a critic that nobody compiles for one of the generator."""
    made, judge = Net(classes=WIDTH), Critic()
    user.models.append(judge)
    steppers = adamw(made), adamw(judge)
    call = user.compile(made, steppers[0])
    for number in range(STEPS):
        x, _ = user.data(number)
        for part in range(3):
            real, _ = user.data(100 * number + part)
            with torch.no_grad():
                fake = call(real)
            steppers[1].zero_grad()
            loss = (judge(fake) - judge(real)).mean()
            loss.backward()
            steppers[1].step()
            with torch.no_grad():
                for parameter in judge.parameters():
                    parameter.clamp_(-0.1, 0.1)
        steppers[0].zero_grad()
        (-judge(call(x)).mean()).backward()
        steppers[0].step()
        user.note(loss)
        yield


@loop
def part_before_the_model(user: User) -> Iterator[None]:
    """An encoder that nobody compiles is trained with the model behind it."""
    encoder, model = Net(classes=WIDTH), Net()
    user.models.append(encoder)
    stepper = torch.optim.AdamW([*encoder.parameters(), *model.parameters()], 1e-3)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        stepped(user, stepper, entropy(call(encoder(x).tanh()), x, y))
        yield


@loop
def derivatives_of_derivatives(user: User) -> Iterator[None]:
    """Two inner steps on weights of their own, by derivatives of derivatives, then the outer one."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        (x, y), (other, label) = user.data(2 * number), user.data(2 * number + 1)
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, x), y)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        weights = {name: value - 0.1 * slope for (name, value), slope in zip(weights.items(), slopes, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(model, weights, other), label)
        stepper.zero_grad()
        (outer + F.cross_entropy(call(x), y)).backward()
        stepper.step()
        user.note(outer)
        yield


@loop
def two_heads_two_backwards(user: User) -> Iterator[None]:
    """Two tasks, each with a backward of its own through the shared body."""
    model = Net(2)
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        one, two = call(x)
        stepper.zero_grad()
        F.cross_entropy(one, y).backward(retain_graph=True)
        F.cross_entropy(two, (y + 1) % CLASSES).backward()
        stepper.step()
        yield


@loop
def tasks_with_calls_of_their_own(user: User) -> Iterator[None]:
    """Gradients of two tasks are projected on each other before the step."""
    model = Net(2)
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        slopes = []
        for task in range(2):
            stepper.zero_grad()
            F.cross_entropy(call(x)[task], (y + task) % CLASSES).backward()
            slopes.append([None if each.grad is None else each.grad.clone() for each in model.parameters()])
        for parameter, *both in zip(model.parameters(), *slopes, strict=True):
            one, two = (each if each is not None else torch.zeros_like(parameter) for each in both)
            inner = (one * two).sum().clamp(max=0) / (two.square().sum() + 1e-9)
            parameter.grad = one - inner * two + two
        stepper.step()
        yield


@loop
def sampled_elbo(user: User) -> Iterator[None]:
    """An autoencoder whose decoder is called for each of several samples."""
    encoder, decoder = Net(2, classes=16), nn.Sequential(nn.Linear(16, 128), nn.GELU(), nn.Linear(128, WIDTH))
    user.models.append(decoder)
    stepper = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], 1e-3)
    call = user.compile(encoder, stepper)
    for number in range(STEPS):
        x, _ = user.data(number)
        mean, spread = call(x)
        draws = torch.Generator().manual_seed(number)
        fits = []
        for _ in range(4):
            z = mean + (0.5 * spread).exp() * torch.randn(mean.shape, generator=draws)
            fits.append(-(decoder(z) - x).square().sum(-1))
        bound = torch.stack(fits).logsumexp(0).mean()
        kl = -0.5 * (1 + spread - mean.square() - spread.exp()).sum(-1).mean()
        stepped(user, stepper, kl - bound)
        yield


@loop
def accumulation_clipped(user: User) -> Iterator[None]:
    """Four batches a step, of which the gradients' norm is clipped, with a scaler."""
    model = Net()
    stepper, scaler = adamw(model), torch.amp.GradScaler("cpu")
    call = user.compile(model, stepper)
    for number in range(STEPS):
        for part in range(4):
            x, y = user.data(4 * number + part)
            loss = entropy(call(x), x, y) / 4
            scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        user.note(loss)
        yield


class Routed(nn.Module):
    """Experts that each take the rows that a router sends them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 128), nn.GELU(), nn.Linear(128, WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            chance, chosen = self.router(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (chosen == number).nonzero().squeeze(1)
                out = out.index_add(0, rows, expert(x[rows]) * chance[rows, None])
            x = x + out
        return self.head(x)


@loop
def routed_experts(user: User) -> Iterator[None]:
    model = Routed()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number, 2 * BATCH)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


@loop
def frozen_convolutions(user: User) -> Iterator[None]:
    """A head on features of convolutions that are not trained."""
    body = nn.Sequential(
        *(part for _ in range(4) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()))
    )
    body.requires_grad_(False).eval()
    head = nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, CLASSES),
    )
    model = nn.Sequential(body, head)
    stepper = adamw(head)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        draws = torch.Generator().manual_seed(number)
        x, y = torch.randn(128, 8, 8, 8, generator=draws), user.data(number, 128)[1]
        stepped(user, stepper, F.cross_entropy(call(x), y))
        yield
