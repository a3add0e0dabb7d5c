"""Loops that put other weights, or other modules, into a model that is compiled already."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.loops.user import BATCH, DEPTH, STEPS, Net, User, adamw, entropy, loop, stepped


class Adapted(nn.Module):
    """A linear layer that is frozen, and what of low rank is learnt beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> Any:
        return self.base(x) + self.up(self.down(x))


def usual(user: User, model: nn.Module, change: Any, stepper: Any = None) -> Iterator[None]:
    """A usual loop; `change(model, call, stepper, number)` comes before each step, and may give another optimizer."""
    stepper = stepper or adamw(model)
    call = user.compile(model, stepper)
    for number in range(STEPS):
        new = change(model, call, stepper, number)
        if new is not None:
            stepper = new
        del new
        x, y = user.data(number)
        x = x.to(next(model.parameters()).dtype)
        stepped(user, stepper, entropy(call(x), x, y))
        yield


def evaluated(user: User, model: nn.Module, number: int) -> None:
    with torch.no_grad():
        x, y = user.data(100 + number)
        user.note(entropy(model(x), x, y))


@loop
def swaps(user: User) -> Iterator[None]:
    def change(model: nn.Module, call: Any, stepper: Any, number: int) -> None:
        stepper.zero_grad()
        if number in (4, 8):
            torch.manual_seed(number)
            for parameter in model.parameters():
                torch.utils.swap_tensors(parameter, nn.Parameter(0.1 * torch.randn_like(parameter)))

    return usual(user, Net(), change)


@loop
def casts(user: User) -> Iterator[None]:
    def change(model: nn.Module, call: Any, stepper: Any, number: int) -> None:
        if number == 4:
            model.double()
        if number == 8:
            call.float()

    model = Net()
    return usual(user, model, change, torch.optim.SGD(model.parameters(), 0.1))


@loop
def casts_by_swaps(user: User) -> Iterator[None]:
    def change(model: nn.Module, call: Any, stepper: Any, number: int) -> None:
        if number not in (4, 8):
            return
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(torch.float64 if number == 4 else torch.float32)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    model = Net()
    return usual(user, model, change, torch.optim.SGD(model.parameters(), 0.1))


@loop
def prunes(user: User) -> Iterator[None]:
    def change(model: Any, call: Any, stepper: Any, number: int) -> Any:
        layers = [*model.body[::2], model.heads[0]]
        if number in (4, 6):
            for layer in layers:
                prune.l1_unstructured(layer, "weight", 0.3)
        if number == 9:
            for layer in layers:
                prune.remove(layer, "weight")
        return adamw(model) if number in (4, 9) else None

    return usual(user, Net(), change)


@loop
def adapts(user: User) -> Iterator[None]:
    def change(model: Any, call: Any, stepper: Any, number: int) -> Any:
        if number != 4:
            return None
        stepper.zero_grad()
        torch.manual_seed(0)
        for index in range(DEPTH):
            model.body[index] = Adapted(model.body[index])
        found = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-3)
        if call is not model:
            call.set_optimizer(found)
        return found

    return usual(user, Net(), change)


@loop
def copies(user: User) -> Iterator[None]:
    """The mean of the weights in a copy that is made anew now and then, and evaluated after each step."""
    held: list[Any] = []

    def change(model: Any, call: Any, stepper: Any, number: int) -> None:
        if number == 2:
            held.append(copy.deepcopy(model).requires_grad_(False))
        if number == 6:
            held[0] = copy.deepcopy(call).requires_grad_(False)
        for average in held:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.1)
            evaluated(user, average, number)

    return usual(user, Net(), change)


@loop
def averages(user: User) -> Iterator[None]:
    held: list[Any] = []

    def change(model: Any, call: Any, stepper: Any, number: int) -> None:
        if number == 2:
            held.append(torch.optim.swa_utils.AveragedModel(call, use_buffers=True))
        for average in held:
            average.update_parameters(call)
            evaluated(user, average, number)

    return usual(user, Net(), change)


@loop
def assigns(user: User) -> Iterator[None]:
    def change(model: Any, call: Any, stepper: Any, number: int) -> Any:
        if number not in (4, 8):
            return None
        stepper.zero_grad()
        given = {name: 0.5 * value for name, value in call.state_dict().items()}
        call.load_state_dict(given, assign=True)
        found = adamw(model)
        if call is not model and number == 4:
            call.set_optimizer(found)
        return found

    return usual(user, Net(), change)


@loop
def freezes(user: User) -> Iterator[None]:
    def change(model: Any, call: Any, stepper: Any, number: int) -> Any:
        if number % 4 or not number:
            return None
        stepper.zero_grad()
        model.body.requires_grad_(number == 8)
        return adamw(model) if number == 8 else torch.optim.SGD(model.heads.parameters(), 0.1)

    return usual(user, Net(), change)


@loop
def ties(user: User) -> Iterator[None]:
    def change(model: Any, call: Any, stepper: Any, number: int) -> Any:
        if number == 4:
            stepper.zero_grad()
            model.body[3].weight = model.body[1].weight
        if number == 8:
            model.body[3].weight = nn.Parameter(model.body[1].weight.detach().clone())
        return adamw(model) if number in (4, 8) else None

    return usual(user, Net(), change)


def normed(user: User, norm: Any) -> Iterator[None]:
    """A norm of weights from the third step to the seventh, and evaluation in between."""

    def change(model: Any, call: Any, stepper: Any, number: int) -> Any:
        torch.manual_seed(number)
        layers = [*model.body[::3], model.heads[0]]
        if number == 3:
            for layer in layers:
                norm(layer)
        if number == 7:
            for layer in layers:
                parametrize.remove_parametrizations(layer, "weight")
        if number % 2:
            call.eval()
            evaluated(user, call, number)
            call.train()
        return adamw(model) if number in (3, 7) else None

    return usual(user, Net(), change)


@loop
def weight_norms(user: User) -> Iterator[None]:
    return normed(user, parametrizations.weight_norm)


@loop
def spectral_norms(user: User) -> Iterator[None]:
    return normed(user, parametrizations.spectral_norm)


@loop
def vectors(user: User) -> Iterator[None]:
    """Weights of a population, each a vector that is made the model's for a step."""
    model = Net()
    call = user.compile(model)
    population = [nn.utils.parameters_to_vector(model.parameters()).detach().clone() for _ in range(2)]
    for number in range(STEPS):
        vector = population[number % 2]
        nn.utils.vector_to_parameters(vector, model.parameters())
        x, y = user.data(number)
        model.zero_grad()
        loss = entropy(call(x), x, y)
        loss.backward()
        user.note(loss)
        with torch.no_grad():
            vector -= 0.1 * torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        yield


@loop
def datas(user: User) -> Iterator[None]:
    """Weights are set by `data`: rounded ones for the call, the exact ones for the step."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for x, y in user.batches():
        exact = [parameter.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = (parameter.data * 64).round() / 64
        loss = entropy(call(x), x, y)
        stepper.zero_grad()
        loss.backward()
        for parameter, value in zip(model.parameters(), exact, strict=True):
            parameter.data = value
        stepper.step()
        user.note(loss)
        del exact, value
        yield


@loop
def quantizes(user: User) -> Iterator[None]:
    """A copy in int8 is evaluated now and then."""

    def change(model: Any, call: Any, stepper: Any, number: int) -> None:
        if number % 4 == 3:
            small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model).eval(), {nn.Linear})
            evaluated(user, small, number)

    return usual(user, Net(), change)


@loop
def functional_steps(user: User) -> Iterator[None]:
    """First-order MAML: a step on weights of its own for each task, whose gradients there are the model's."""
    model = Net()
    stepper, call = user.with_adamw(model)
    for number in range(STEPS):
        stepper.zero_grad()
        for task in range(2):
            x, y = user.data(2 * number + task)
            fast = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
            loss = entropy(torch.func.functional_call(call, fast, (x,)), x, y)
            moves = torch.autograd.grad(loss, list(fast.values()))
            fast = {
                name: (value - 0.1 * move).detach().requires_grad_()
                for (name, value), move in zip(fast.items(), moves, strict=True)
            }
            loss = entropy(torch.func.functional_call(call, fast, (x,)), x, y)
            moves = torch.autograd.grad(loss, list(fast.values()))
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.grad = move if parameter.grad is None else parameter.grad + move
            user.note(loss)
        del fast, moves, move, loss
        stepper.step()
        yield


@loop
def ensembles(user: User) -> Iterator[None]:
    """Several models as one by `vmap` of `torch.func.grad`, which the original model goes through, beside its steps."""
    model = Net()
    model.checkpointed = False  # nothing of that within `vmap`
    stepper, call = user.with_adamw(model)
    weights, buffers = torch.func.stack_module_state([model, copy.deepcopy(model)])

    def loss_of(each: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return entropy(torch.func.functional_call(model, (each, buffers), (x,)), x, y)

    for number in range(STEPS):
        x, y = user.data(number, BATCH // 4)
        moves = torch.func.vmap(torch.func.grad(loss_of), in_dims=(0, None, None))(weights, x, y)
        weights = {name: (value - 0.1 * moves[name]).detach() for name, value in weights.items()}
        stepped(user, stepper, entropy(call(x), x, y))
        user.note(sum(value.mean() for value in weights.values()))
        yield
