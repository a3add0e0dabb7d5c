"""What loops are made of: a user's surroundings, a model, a usual loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memopt

STEPS = 8  # of each loop
WIDTH, CLASSES, BATCH, DEPTH = 32, 96, 512, 8

Step = Callable[[], Any]
Loop = Callable[["User"], Iterator[None]]
LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


class User:
    """What a loop asks of its surroundings: models, data, and the stand-in under a budget, or the model itself."""

    def __init__(self, budget: int | None, engine: str) -> None:
        self.budget, self.engine, self.compiled = budget, engine, list[Any]()

    def compile(self, model: nn.Module, optimizer: Any = None) -> Any:
        if self.budget is None:
            return model
        self.compiled.append(memopt.compile(model, self.budget, optimizer=optimizer, backend=self.engine))
        return self.compiled[-1]

    def data(self, seed: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(size, WIDTH, generator=generator)
        return x, torch.randint(0, CLASSES, (size,), generator=generator)

    @property
    def said(self) -> bool:
        return any("over its budget" in note for item in self.compiled for note in item.report.notes)


class Net(nn.Module):
    """A body whose activations outweigh its weights, and a head of many classes, or several."""

    def __init__(self, heads: int = 1, classes: int = CLASSES, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, classes) for _ in range(heads))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.body:
            x = x + self.dropout(F.gelu(layer(x)).tanh())
        found = [head(x) for head in self.heads]
        return found[0] if len(found) == 1 else tuple(found)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-3, **options)


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
