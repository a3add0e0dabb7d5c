"""Loops in which two features meet: losses alone, retained graphs, frozen parts, other sizes."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.loops.user import BATCH, CLASSES, STEPS, WIDTH, Net, User, adamw, entropy, loop, stepped


@dataclasses.dataclass
class Output:
    """As libraries' models return it."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class WithLoss(Net):
    """A model that computes its loss where it is given labels, and the distance to another's logits."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None, other: torch.Tensor | None = None) -> Output:
        logits = super().forward(x)
        loss = None if y is None else F.cross_entropy(logits, y)
        if loss is not None and other is not None:
            loss = loss + F.mse_loss(logits, other)
        return Output(loss, logits)


def by_its_loss(user: User, call: Any, stepper: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """A step by the loss that a model returns, which is all that is taken of what it returns."""
    stepper.zero_grad()
    loss = call(x, y).loss
    loss.backward()
    stepper.step()
    user.note(loss)


class Checkpointed(WithLoss):
    """Every second layer within a checkpoint."""

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if layer in list(self.body)[::2]:
            return checkpoint(super()._block, layer, x, use_reentrant=False)
        return super()._block(layer, x)


@loop
def clipped_by_tensor_hooks(user: User) -> Iterator[None]:
    """Hooks clip gradients, which are set to zeros; the norm is logged every fourth step."""
    model = WithLoss()
    for p in model.parameters():
        p.register_hook(lambda g: g.clamp(-0.01, 0.01))
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        stepper.zero_grad(set_to_none=False)
        loss = call(x, y).loss
        loss.backward()
        if number % 4 == 3:
            user.losses.append(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None))
        stepper.step()
        user.note(loss)
        yield


@loop
def sharpness_of_parts(user: User) -> Iterator[None]:
    """Sharpness-aware steps, each of whose two gradients comes of two batches."""
    model = WithLoss()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        for part in range(2):
            (call(*user.data(10 * number + part)).loss / 2).backward()
        with torch.no_grad():
            moved = [(p, p.grad * 0.01) for p in model.parameters() if p.grad is not None]
            for p, by in moved:
                p.add_(by)
        stepper.zero_grad()
        for part in range(2):
            loss = call(*user.data(10 * number + part)).loss / 2
            loss.backward()
            user.note(loss)
        with torch.no_grad():
            for p, by in moved:
                p.sub_(by)
        stepper.step()
        stepper.zero_grad()
        yield


class Fitted(Net):
    """A model that is fitted to classes by squares."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Output:
        logits = super().forward(x)
        return Output(F.mse_loss(logits, F.one_hot(y, CLASSES).float()), logits)


@loop
def lbfgs_of_a_head(user: User) -> Iterator[None]:
    """LBFGS with a line search for a head on a frozen body: its closure is called many times a step."""
    model = Fitted()
    model.body.requires_grad_(False)
    stepper = torch.optim.LBFGS(model.heads.parameters(), 0.1, max_iter=3, line_search_fn="strong_wolfe")
    call = user.compile(model, stepper)
    for x, y in user.batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            stepper.zero_grad()
            loss = call(x, y).loss
            loss.backward()
            return loss

        user.note(stepper.step(closure))
        yield


class Cell(nn.Module):
    """A recurrent cell that also says how far it is from what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.GRUCell(WIDTH, 64), nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor, h: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.inner(x, h)
        return {"loss": F.cross_entropy(self.head(h), y), "state": h}


@loop
def cell_with_losses(user: User) -> Iterator[None]:
    """A cell over time: every call's loss and state are used, the last one's loss alone."""
    model = Cell()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        h, total = torch.zeros(len(x), 64), torch.zeros(())
        for part in range(3):
            out = call(x.roll(part, 1), h, y)
            h, total = out["state"], total + out["loss"]
        total = total + call(x, h, y)["loss"]
        stepped(user, stepper, total)
        yield


@loop
def distilled_by_loss_alone(user: User) -> Iterator[None]:
    """A frozen teacher under the same budget, whose logits the student takes to its loss."""
    student, teacher = WithLoss(), Net(2).eval().requires_grad_(False)
    stepper = adamw(student)
    call, ask = user.compile([student, teacher], stepper)
    for x, y in user.batches():
        with torch.no_grad():
            other = ask(x)[0]
        loss = call(x, y, other).loss
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        user.note(loss)
        yield


@loop
def saliency_now_and_then(user: User) -> Iterator[None]:
    """Every third step also asks for the gradient of the input, and keeps the graph for that."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        x.requires_grad_(number % 3 == 2)
        loss = entropy(call(x), x, y)
        if number % 3 == 2:
            (found,) = torch.autograd.grad(loss, x, retain_graph=True)
            user.losses.append(found.abs().mean().item())
        stepped(user, stepper, loss)
        yield


@loop
def metrics_after_the_step(user: User) -> Iterator[None]:
    """The logits that came with the loss are looked at when the optimizer has stepped."""
    model = WithLoss()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        out = call(x, y)
        stepper.zero_grad()
        out.loss.backward()
        stepper.step()
        user.losses += [out.loss.item(), (out.logits.argmax(-1) == y).float().mean().item()]
        yield


@loop
def steps_left_out(user: User) -> Iterator[None]:
    """A batch whose loss is odd is left out: its graph is never gone backward through."""
    model = WithLoss()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        loss = call(x, y).loss
        if number % 4 == 1:
            user.note(loss)
            yield
            continue
        stepped(user, stepper, loss)
        yield


@loop
def resumes(user: User) -> Iterator[None]:
    """Half-way all is saved, and another model and optimizer go on from there."""
    kept = io.BytesIO()

    def begun() -> tuple[nn.Module, Any, Any]:
        model = WithLoss()
        stepper = adamw(model)
        return model, stepper, user.compile(model, stepper)

    model, stepper, call = begun()
    for number in range(STEPS):
        if number == STEPS // 2:
            torch.save({"model": call.state_dict(), "optimizer": stepper.state_dict()}, kept)
            user.models.remove(model)
            del model, stepper, call
            model, stepper, call = begun()
            kept.seek(0)
            found = torch.load(kept)
            call.load_state_dict(found["model"])
            stepper.load_state_dict(found["optimizer"])
            del found
        x, y = user.data(number)
        by_its_loss(user, call, stepper, x, y)
        yield


@loop
def evaluates_larger_batches(user: User) -> Iterator[None]:
    """Training takes losses alone, evaluation of batches twice as large takes logits alone."""
    model = WithLoss(dropout=0.1)
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        by_its_loss(user, call, stepper, x, y)
        if number % 4 == 2:
            call.eval()
            with torch.no_grad():
                x, y = user.data(100 + number, 2 * BATCH)
                user.losses.append((call(x).logits.argmax(-1) == y).float().mean().item())
            call.train()
        yield


@loop
def accumulates_lengths(user: User) -> Iterator[None]:
    """Micro-batches of several sizes, weighted by how many rows they have; gradients are clipped."""
    model = WithLoss()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        sizes = [BATCH, BATCH // 2, BATCH // 4]
        for part, size in enumerate(sizes):
            loss = call(*user.data(10 * number + part, size)).loss * (size / sum(sizes))
            loss.backward()
            user.note(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad(set_to_none=False)
        yield


@loop
def scaled_accumulation(user: User) -> Iterator[None]:
    """Autocast, a scaler and two micro-batches."""
    model = WithLoss()
    stepper, scaler = adamw(model), torch.amp.GradScaler("cpu", init_scale=8.0)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        for part in range(2):
            x, y = user.data(10 * number + part)
            with torch.autocast("cpu", torch.bfloat16):
                loss = call(x, y).loss / 2
            scaler.scale(loss).backward()
            user.note(loss)
        scaler.unscale_(stepper)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        stepper.zero_grad()
        yield
