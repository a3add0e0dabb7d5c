"""What loops are made of: a user's surroundings, a model, a usual loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt

STEPS = 12  # of each loop
WIDTH, CLASSES, BATCH, DEPTH = 32, 96, 512, 8

Step = Callable[[], Any]
Loop = Callable[["User"], Iterator[None]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


class User:
    """What a loop asks of its surroundings: models, data, and the stand-in under a budget, or the model itself."""

    def __init__(self, budget: int | float | None, engine: str) -> None:
        self.budget, self.engine, self.compiled = budget, engine, list[Any]()
        self.models, self.losses = list[nn.Module](), list[float]()

    def compile(self, model: Any, optimizer: Any = None) -> Any:
        """The stand-in of a model, or those of several that share the budget."""
        models = model if isinstance(model, list) else [model]
        self.models += models
        if self.budget is None:
            return model
        found = memopt.compile(model, self.budget, optimizer=optimizer, backend=self.engine)
        self.compiled += found if isinstance(found, list) else [found]
        return found

    def note(self, loss: torch.Tensor) -> None:
        """Keep a loss's number."""
        self.losses.append(loss.item())

    def data(self, seed: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, WIDTH, generator=generator)
        return x, torch.randint(0, CLASSES, (size,), generator=generator)

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The data of each step."""
        return map(self.data, range(STEPS))

    def with_adamw(self, model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        """AdamW of a model, and the model's stand-in, which is told of it."""
        stepper = adamw(model)
        return stepper, self.compile(model, stepper)

    @property
    def said(self) -> bool:
        return any("over its budget" in note for item in self.compiled for note in item.report.notes)


class Net(nn.Module):
    """A body whose activations outweigh its weights, and a head of many classes, or several."""

    checkpointed = False  # by `torch.utils.checkpoint`, for who compares with that

    def __init__(self, heads: int = 1, classes: int = CLASSES, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, classes) for _ in range(heads))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.body:
            x = checkpoint(self._block, layer, x, use_reentrant=False) if self.checkpointed else self._block(layer, x)
        found = [head(x) for head in self.heads]
        return found[0] if len(found) == 1 else tuple(found)

    def _block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(F.gelu(layer(x)).tanh())


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, **options)


def stepped(user: User, stepper: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """The end of a usual step, by a loss that the caller may hold on to."""
    stepper.zero_grad()
    loss.backward()
    stepper.step()
    user.note(loss)


def by_closures(user: User, model: nn.Module, stepper: torch.optim.Optimizer) -> Iterator[None]:
    """Steps of an optimizer that is given a closure, whose loss the loop reads."""
    call = user.compile(model, stepper)
    for x, y in user.batches():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            stepper.zero_grad()
            loss = entropy(call(x), x, y)
            loss.backward()
            return loss

        user.note(stepper.step(closure))
        yield


def plain(
    user: User,
    loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    given: bool = True,
    clip: Callable[[nn.Module], Any] | None = None,
    autocast: bool = False,
    zero: str = "first",
    set_to_none: bool = True,
    after: Callable[[nn.Module, int], Any] | None = None,
) -> Iterator[None]:
    """A usual loop; what a caller's variables hold from one step to the next is as in a loop at a module's level."""
    model = Net() if model is None else model
    stepper = optimizer(model)
    call = user.compile(model, stepper if given else None)
    for number in range(STEPS):
        x, y = user.data(number)
        if zero == "first":
            stepper.zero_grad(set_to_none=set_to_none)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = call(x)
            loss = loss_of(out, x, y)
        if zero == "backward":
            stepper.zero_grad(set_to_none=set_to_none)
        loss.backward()
        if clip is not None:
            clip(model)
        stepper.step()
        if zero == "last":
            stepper.zero_grad(set_to_none=set_to_none)
        if after is not None:
            after(model, number)
        yield


def entropy(out: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y)
