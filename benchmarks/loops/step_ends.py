"""What ends a step: clipping, optimizers, averages, evaluation."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.loops.user import BATCH, STEPS, Net, User, adamw, entropy, loop, plain


@loop
def clip_norm(user: User) -> Iterator[None]:
    return plain(user, entropy, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@loop
def clip_norm_one_by_one(user: User) -> Iterator[None]:
    return plain(user, entropy, clip=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))


@loop
def gradients_logged(user: User) -> Iterator[None]:
    return plain(user, entropy, clip=lambda model: [parameter.grad.clone() for parameter in model.parameters()])


@loop
def adamw_foreach(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: adamw(model, foreach=True, amsgrad=True))


@loop
def adamw_fused(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: adamw(model, fused=True))


@loop
def adamw_one_by_one(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: adamw(model, foreach=False))


@loop
def momentum(user: User) -> Iterator[None]:
    return plain(user, entropy, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


@loop
def momentum_unknown(user: User) -> Iterator[None]:
    return plain(
        user, entropy, given=False, optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    )


@loop
def gradient_scaler(user: User) -> Iterator[None]:
    model = Net()
    stepper, scaler = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.amp.GradScaler("cpu")
    call = user.compile(model, stepper)
    for x, y in user.batches():
        loss = entropy(call(x), x, y)
        stepper.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        yield


@loop
def average_before(user: User) -> Iterator[None]:
    model = Net()
    mean = copy.deepcopy(model)

    @torch.no_grad()
    def after(model: nn.Module, number: int) -> None:
        for kept, new in zip(mean.parameters(), model.parameters(), strict=True):
            kept.mul_(0.9).add_(new * 0.1)

    return plain(user, entropy, model=model, after=after)


@loop
def average_from_second_step(user: User) -> Iterator[None]:
    kept: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def after(model: nn.Module, number: int) -> None:
        for name, value in model.state_dict().items() if number else ():
            kept[name] = value.clone() if name not in kept else kept[name].lerp_(value, 0.1)

    return plain(user, entropy, after=after)


@loop
def averaged_model(user: User) -> Iterator[None]:
    model = Net()
    mean = torch.optim.swa_utils.AveragedModel(model)
    return plain(user, entropy, model=model, after=lambda model, number: mean.update_parameters(model))


@loop
def evaluation_between(user: User) -> Iterator[None]:
    model = Net(dropout=0.1)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        call.train()
        x, y = user.data(number)
        loss = entropy(call(x), x, y)
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        call.eval()
        with torch.no_grad():
            (call(user.data(number, 2 * BATCH)[0]).argmax(-1) == 0).float().mean()
        yield


@loop
def adversarial_pair(user: User) -> Iterator[None]:
    model = Net()
    stepper = torch.optim.SGD(model.parameters(), 0.1)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        entropy(call(x), x, y).backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad, alpha=0.05)
        stepper.zero_grad()
        entropy(call(x), x, y).backward()
        with torch.no_grad():
            for parameter, old in zip(model.parameters(), before, strict=True):
                parameter.copy_(old)
        stepper.step()
        stepper.zero_grad()
        del before
        yield
