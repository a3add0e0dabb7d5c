"""Steps under a budget: small models with room to recompute, feasible budgets, and what a step really holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt


class Deep(nn.Module):
    """Layers whose activations outweigh their weights; without dropout unless asked for."""

    def __init__(self, layers: int = 4, width: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + self.dropout(nn.functional.gelu(layer(self.norm(x))).tanh())
        return x.square().mean()


def make(**options: Any) -> tuple[Deep, torch.Tensor]:
    """The model and its input, the same at every call."""
    torch.manual_seed(0)
    model = Deep(**options)
    return model, torch.randn(256, model.norm.normalized_shape[0])


def step(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Take a step under one seed; its loss."""
    torch.manual_seed(1)
    loss = run(x)
    loss.backward()
    return loss.detach()


def budget_for(
    model: nn.Module,
    inputs: Any,
    share: float = 0.1,
    *,
    more: int = 0,
    optimizer: torch.optim.Optimizer | None = None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> int:
    """A feasible budget: 2 % above the least at share 0, what a step takes without a plan at share 1; `more` on top."""
    torch._dynamo.reset()
    with context():
        report = memopt.plan(model, inputs, optimizer=optimizer)
    torch._dynamo.reset()
    low, high = int(report.minimum_bytes * 1.02), report.unconstrained_bytes
    return int(low + share * (high - low)) + more


def bytes_of(*held: Any) -> int:
    """Bytes of the distinct storages of modules (with their gradients), optimizers' states and tensors."""
    storages: dict[int, int] = {}
    for tensor in _tensors(held):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _tensors(held: Iterable[Any]) -> Iterable[torch.Tensor]:
    for item in held:
        if isinstance(item, nn.Module):
            for parameter in item.parameters():
                yield from (parameter, *([] if parameter.grad is None else [parameter.grad]))
            yield from item.buffers()
        elif isinstance(item, torch.optim.Optimizer):
            yield from (leaf for state in item.state.values() for leaf in pytree.tree_leaves(state) if _is_tensor(leaf))
        else:
            yield from (leaf for leaf in pytree.tree_leaves(item) if _is_tensor(leaf))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def peak_of(step: Callable[[], Any], *held: Any) -> int:
    """The most bytes during a step: what is held before it, and what the allocator saw."""
    before = bytes_of(*held)
    return before + memopt.measure(step, device="cpu").peak_bytes


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    """A copy of each parameter's gradient."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_equal(found: Any, expected: Any) -> None:
    """Bitwise equal, leaf by leaf."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def loop(run: Callable[..., Any], optimizer: torch.optim.Optimizer, x: Any, steps: int = 3) -> list[torch.Tensor]:
    """The losses of so many steps; each has random numbers of its own."""
    losses = []
    for number in range(steps):
        torch.manual_seed(number)
        loss = run(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses
