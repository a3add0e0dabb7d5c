"""Generative models: adversaries in turn, penalties of gradients, diffusion, masks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, STEPS, WIDTH, Net, User, adamw, loop, stepped


def adversaries(user: User, *, together: bool, every: int = 1) -> Iterator[None]:
    """The critic's step, and every so often the generator's."""
    generator, critic = Net(classes=WIDTH), Net(classes=1)
    steppers = [torch.optim.Adam(each.parameters(), 1e-3, betas=(0.5, 0.9)) for each in (generator, critic)]
    if together:
        make, judge = user.compile([generator, critic], steppers)
    else:
        make, judge = user.compile(generator, steppers[0]), user.compile(critic, steppers[1])
    for number in range(STEPS):
        real, noise = user.data(2 * number)[0], user.data(2 * number + 1)[0]
        if every > 1:
            with torch.no_grad():
                fake = make(noise)
        else:
            fake = make(noise)
        loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
        steppers[1].zero_grad()
        loss.backward()
        steppers[1].step()
        user.note(loss)
        if number % every == every - 1:
            if every > 1:
                fake = make(noise)
            loss = F.softplus(-judge(fake)).mean()
            steppers[0].zero_grad()
            loss.backward()
            steppers[0].step()
            user.note(loss)
        yield


@loop
def gan(user: User) -> Iterator[None]:
    return adversaries(user, together=False)


@loop
def gan_together(user: User) -> Iterator[None]:
    return adversaries(user, together=True)


@loop
def gan_in_turn(user: User) -> Iterator[None]:
    return adversaries(user, together=False, every=3)


@loop
def gan_in_turn_together(user: User) -> Iterator[None]:
    return adversaries(user, together=True, every=3)


@loop
def gradient_penalty(user: User) -> Iterator[None]:
    """A double backward, which compiled code does not give: it is to be refused in a line."""
    critic = Net(classes=1)
    stepper = adamw(critic)
    judge = user.compile(critic, stepper)
    for number in range(STEPS):
        x = user.data(number)[0].requires_grad_()
        out = judge(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = out.mean() + 10 * (gradient.norm(dim=-1) - 1).square().mean()
        stepped(user, stepper, loss)
        yield


class Denoiser(nn.Module):
    """Tells the noise from what is noisy, and from how much it is."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(100, WIDTH), Net(classes=WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        return self.net(x + self.time(t))


@loop
def ddpm(user: User) -> Iterator[None]:
    model = Denoiser()
    stepper, call = user.with_adamw(model)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
    mean = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for number in range(STEPS):
        x, _ = user.data(number)
        draws = torch.Generator().manual_seed(number)
        t, noise = torch.randint(0, 100, (len(x),), generator=draws), torch.randn(x.shape, generator=draws)
        noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
        loss = F.mse_loss(call(noisy, t), noise)
        stepper.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                mean[name].lerp_(value, 0.01)
        user.note(loss)
        if number % 4 == 3:  # samples, a few steps of them
            model.eval()
            with torch.no_grad():
                x = torch.randn(BATCH // 2, WIDTH, generator=draws)
                for step in range(3):
                    x = x - 0.1 * call(x, torch.full((len(x),), step))
            user.note(x.mean())
            model.train()
        yield


class Masked(nn.Module):
    """Encodes the parts that are kept, and tells all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(classes=WIDTH), Net(classes=WIDTH)
        self.mask = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor, kept: torch.Tensor, back: torch.Tensor) -> Any:
        seen = self.encoder(torch.gather(x, 1, kept[..., None].expand(-1, -1, x.shape[-1])))
        missing = self.mask.expand(len(x), x.shape[1] - seen.shape[1], -1)
        every = torch.cat([seen, missing], 1)
        return self.decoder(torch.gather(every, 1, back[..., None].expand(-1, -1, every.shape[-1])))


@loop
def masked_autoencoder(user: User) -> Iterator[None]:
    model = Masked()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x = user.data(number)[0].view(BATCH // 16, 16, WIDTH)
        order = torch.rand(len(x), 16, generator=torch.Generator().manual_seed(number)).argsort(1)
        out = call(x, order[:, :4], order.argsort(1))
        hidden = torch.ones(len(x), 16).scatter_(1, order[:, :4], 0.0)
        loss = ((out - x).square().mean(-1) * hidden).sum() / hidden.sum()
        stepped(user, stepper, loss)
        yield


@loop
def variational(user: User) -> Iterator[None]:
    """Noise between two calls, of two models with one optimizer."""
    encoder, decoder = Net(2, classes=WIDTH), Net(classes=WIDTH)
    stepper = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], 1e-3)
    encode, decode = user.compile([encoder, decoder], stepper)
    for number in range(STEPS):
        x, _ = user.data(number)
        mean, logs = encode(x)
        z = mean + (0.5 * logs).exp() * torch.randn(mean.shape, generator=torch.Generator().manual_seed(number))
        loss = F.mse_loss(decode(z), x) - 0.005 * (1 + logs - mean.square() - logs.exp()).mean()
        stepped(user, stepper, loss)
        yield
