"""What loops run between backward's end and the optimizer's step: gradients in a row, metrics, second models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.loops.user import BATCH, STEPS, WIDTH, Net, User, adamw, entropy, loop


def wide() -> nn.Module:
    """A model whose weights are most of its step."""
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 96))


def then(user: User, after: Callable[..., object], model: nn.Module | None = None) -> Iterator[None]:
    """A usual loop, and what runs behind its backward, with the model, outputs, a batch and its labels."""
    model = Net() if model is None else model
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        out = call(x)
        loss = entropy(out, x, y)
        stepper.zero_grad()
        loss.backward()
        after(model, out, x, y)
        stepper.step()
        user.note(loss)
        yield


@loop
def gradients_in_a_row(user: User) -> Iterator[None]:
    """Clipping by a norm of all gradients, put in a row."""

    def clip(model: nn.Module, *_: object) -> None:
        row = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        scale = (1.0 / (row.norm() + 1e-6)).clamp(max=1.0)
        for parameter in model.parameters():
            parameter.grad.mul_(scale)

    return then(user, clip, wide())


@loop
def clipping_of_clones(user: User) -> Iterator[None]:
    def clip(model: nn.Module, *_: object) -> None:
        clones = [parameter.grad.clone() for parameter in model.parameters()]
        norm = torch.stack([clone.square().sum() for clone in clones]).sum().sqrt()
        for parameter, clone in zip(model.parameters(), clones, strict=True):
            parameter.grad = clone * (1.0 / (norm + 1e-6)).clamp(max=1.0)

    return then(user, clip, wide())


@loop
def metrics_of_outputs(user: User) -> Iterator[None]:
    """Accuracy, entropy and calibration of the outputs that the step has kept."""

    def measure(_: object, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        chances = out.detach().softmax(-1)
        order = chances.sort(-1, descending=True)
        ((order.indices == y[:, None]).cumsum(-1).float().mean(0), -(chances * chances.log()).sum(-1).mean())

    return then(user, measure)


@loop
def second_model_behind(user: User) -> Iterator[None]:
    """A model that nobody compiles looks at the same batch, with a backward of its own, before the step."""
    probe = Net()
    steppers = adamw(probe)

    def train(_: object, out: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        steppers.zero_grad()
        F.cross_entropy(probe(x), y).backward()

    return then(user, train)


@loop
def average_before_the_step(user: User) -> Iterator[None]:
    model = wide()
    mean = copy.deepcopy(model).requires_grad_(False)

    def average(model: nn.Module, *_: object) -> None:
        new = {name: value.detach().clone() for name, value in model.state_dict().items()}
        mean.load_state_dict({name: 0.9 * value + 0.1 * new[name] for name, value in mean.state_dict().items()})

    return then(user, average, model)


@loop
def noise_of_gradients(user: User) -> Iterator[None]:
    """Differential privacy's noise on all gradients at once."""

    def noise(model: nn.Module, *_: object) -> None:
        drawn = [1e-3 * torch.randn_like(parameter.grad) for parameter in model.parameters()]
        torch._foreach_add_([parameter.grad for parameter in model.parameters()], drawn)

    return then(user, noise, wide())


@loop
def validation_behind(user: User) -> Iterator[None]:
    """The compiled model itself, without gradients, on a larger batch before its step."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        x, y = user.data(number)
        loss = entropy(call(x), x, y)
        stepper.zero_grad()
        loss.backward()
        with torch.no_grad():
            ahead = entropy(call(user.data(number, 2 * BATCH)[0]), x, user.data(number, 2 * BATCH)[1])
        stepper.step()
        user.note(ahead)
        yield


@loop
def losses_weighed_by_gradients(user: User) -> Iterator[None]:
    """Two backwards through one graph: the second loss is scaled by the norm of what the first has given."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        out = call(x)
        one, other = entropy(out, x, y), out.square().mean()
        stepper.zero_grad()
        one.backward(retain_graph=True)
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        (other / norm).backward()
        stepper.step()
        user.note(one)
        yield
