"""Loops that change as they go: batches, modes, what is trained, optimizers, errors, checkpoints on disk."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, CLASSES, DEPTH, STEPS, WIDTH, Net, User, adamw, entropy, loop, stepped


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, state: Any = None) -> Any:
        out, state = self.inner(x, state)
        return self.head(out), state


@loop
def truncated_backward(user: User) -> Iterator[None]:
    model = Recurrent()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS // 3):
        x, y = user.data(number, 3 * BATCH)
        x, y, state = x.view(32, -1, WIDTH), y.view(32, -1), None
        for part, labels in zip(x.chunk(3, 1), y.chunk(3, 1), strict=True):
            out, state = call(part.contiguous(), state)
            state = tuple(each.detach() for each in state)
            stepped(user, stepper, F.cross_entropy(out.flatten(0, 1), labels.flatten()))
            yield


@loop
def smaller_last_group(user: User) -> Iterator[None]:
    """Gradients of three batches are added up, of an epoch of seven: the last group is of one."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        parts = 1 if number % 3 == 2 else 3
        for part in range(parts):
            x, y = user.data(10 * number + part)
            loss = entropy(call(x), x, y) / parts
            loss.backward()
            user.note(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        stepper.step()
        stepper.zero_grad()
        yield


@loop
def smaller_last_batch(user: User) -> Iterator[None]:
    model = Net()
    stepper, call = user.with_adamw(model)
    set_of = torch.utils.data.TensorDataset(*user.data(0, 3 * BATCH + BATCH // 3))
    loader = torch.utils.data.DataLoader(set_of, BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS // 4):
        for x, y in loader:
            stepped(user, stepper, entropy(call(x), x, y))
            yield


@loop
def evaluation_now_and_then(user: User) -> Iterator[None]:
    model = Net(dropout=0.1)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        torch.manual_seed(number)
        stepped(user, stepper, entropy(call(x), x, y))
        if number % 3 == 2:
            call.eval()
            with torch.inference_mode():
                for part in range(2):
                    x, y = user.data(100 + part, 2 * BATCH)
                    user.note(entropy(call(x), x, y))
            call.train()
        yield


@loop
def list_of_losses(user: User) -> Iterator[None]:
    model = Net(4)
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        losses = [entropy(out, x, (y + shift) % CLASSES) for shift, out in enumerate(call(x))]
        stepped(user, stepper, torch.stack(losses).sum())
        yield


@loop
def unfreezes(user: User) -> Iterator[None]:
    """A curriculum: the head first, then half of the body, then all of it."""
    model = Net()
    model.body.requires_grad_(False)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        if number == 4:
            for layer in model.body[DEPTH // 2 :]:
                layer.requires_grad_(True)
        if number == 8:
            model.requires_grad_(True)
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


@loop
def adds_a_group(user: User) -> Iterator[None]:
    model = Net()
    model.body.requires_grad_(False)
    stepper = torch.optim.AdamW(model.heads.parameters(), 1e-3)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        if number == 5:
            model.body.requires_grad_(True)
            stepper.add_param_group({"params": list(model.body.parameters()), "lr": 1e-4})
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


@loop
def warms_up(user: User) -> Iterator[None]:
    model = Net()
    stepper = adamw(model)
    rates = torch.optim.lr_scheduler
    schedule = rates.SequentialLR(
        stepper, [rates.LinearLR(stepper, 0.1, total_iters=4), rates.CosineAnnealingLR(stepper, 8)], [4]
    )
    call = user.compile(model, stepper)
    for x, y in user.batches():
        stepped(user, stepper, entropy(call(x), x, y))
        schedule.step()
        yield


@loop
def saves_and_loads(user: User) -> Iterator[None]:
    model = Net()
    stepper, call = user.with_adamw(model)
    stored = io.BytesIO()
    for number in range(STEPS):
        if number == 5:
            torch.save({"model": call.state_dict(), "optimizer": stepper.state_dict()}, stored)
        if number == 8:
            stored.seek(0)
            loaded = torch.load(stored)
            call.load_state_dict(loaded["model"])
            stepper.load_state_dict(loaded["optimizer"])
            del loaded
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


@loop
def errors_in_steps(user: User) -> Iterator[None]:
    """One in the model's call, one in the loss, one in backward: the loop skips the batch."""
    model = Net()
    stepper, call = user.with_adamw(model)

    def fails(_: Any) -> None:
        raise ValueError("a batch is bad")

    for number in range(STEPS):
        x, y = user.data(number)
        try:
            out = call(x[:, :3] if number == 3 else x)
            loss = entropy(out, x, y[:7] if number == 5 else y)
            if number == 7:
                out.register_hook(fails)
            stepped(user, stepper, loss)
        except (ValueError, RuntimeError):
            stepper.zero_grad()
        out = loss = None
        yield


@loop
def hooks_log(user: User) -> Iterator[None]:
    """Forward hooks keep what two of the layers gave, until the next step."""
    model = Net()
    logged: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, __: Any, out: torch.Tensor) -> None:
            logged[name] = out.detach()

        return keep

    for name in ("body.1", "body.5"):
        model.get_submodule(name).register_forward_hook(hook(name))
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        stepped(user, stepper, entropy(call(x), x, y))
        user.note(sum(value.mean() for value in logged.values()))
        yield


class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net(classes=WIDTH)
        self.tasks = nn.ModuleDict({name: nn.Linear(WIDTH, CLASSES) for name in ("a", "b", "c")})

    def forward(self, x: torch.Tensor, task: str) -> Any:
        return self.tasks[task](F.relu(self.net(x)))


@loop
def head_by_batch(user: User) -> Iterator[None]:
    model = Tasks()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x, "abc"[number % 3]), x, y))
        yield


@loop
def average_from_the_middle(user: User) -> Iterator[None]:
    """Stochastic weight averaging from the sixth step on, and an evaluation of the average."""
    model = Net()
    stepper, call = user.with_adamw(model)
    mean: Any = None
    for number in range(STEPS):
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        if number == 5:
            mean = torch.optim.swa_utils.AveragedModel(model)
        elif number > 5:
            mean.update_parameters(model)
            with torch.no_grad():
                user.note(mean(x).mean())
        yield


@loop
def copy_evaluated(user: User) -> Iterator[None]:
    """Now and then a copy of the model is evaluated, and kept if it is the best."""
    model = Net()
    stepper, call = user.with_adamw(model)
    best: Any = None
    for number in range(STEPS):
        x, y = user.data(number)
        stepped(user, stepper, entropy(call(x), x, y))
        if number % 4 == 1:
            best = copy.deepcopy(model.state_dict())
        yield
    del best


@loop
def scaler_and_autocast(user: User) -> Iterator[None]:
    model = Net()
    stepper, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    call = user.compile(model, stepper)
    for x, y in user.batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = entropy(call(x).float(), x, y)
        stepper.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        scaler.step(stepper)
        scaler.update()
        user.note(loss)
        yield


@loop
def two_passes(user: User) -> Iterator[None]:
    """R-Drop: the same batch twice through dropout, and the distance of both."""
    model = Net(dropout=0.1)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        torch.manual_seed(number)
        one, two = call(x), call(x)
        apart = F.kl_div(one.log_softmax(-1), two.softmax(-1), reduction="batchmean")
        stepped(user, stepper, entropy(one, x, y) + entropy(two, x, y) + apart)
        yield
