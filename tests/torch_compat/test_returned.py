"""What a loop writes to what a model returned: as in eager, or refused as in eager."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt


class _Model(nn.Module):
    """Returns what `outputs` makes of a linear layer's result, which plans multiply in place: through a view."""

    def __init__(self, outputs: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.outputs = nn.Linear(3, 4), outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.linear(x) * 0.7)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "alone": lambda y: (y,),
    "transposed": lambda y: (y.mT,),
    "flat": lambda y: (y.view(-1),),
    "two views": lambda y: (y.mT, y.view(-1)),
    "with its base": lambda y: (y[..., 1:], y),
    "beside a piece": lambda y: (y[..., :2], y.mean()),
    "a diagonal": lambda y: (y.flatten(0, -2).diagonal(), y),
    "detached": lambda y: (y.mT, y.detach()),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "multiplied": lambda value: value.mul_(2),
    "masked": lambda value: value.__setitem__(value > 0.1, 0.5),
    "within no_grad": lambda value: _without_gradients(value),
}


def _without_gradients(value: Tensor) -> None:
    with torch.no_grad():
        value.mul_(2)


def _run(model: Any, parameters: list[Tensor], write: Callable[[Tensor], Any], x: Tensor) -> list[Any]:
    """Outputs and gradients of a step that writes to the first output; eager's kind of error in place of them."""
    try:
        out = model(x)
        write(out[0])
        sum((value * value).sum() for value in out if value.requires_grad).backward()
    except RuntimeError as error:
        return [str(error).split(":")[0].split(" of ")[0]]
    return [value.detach().clone() for value in (*out, *(p.grad for p in parameters))]


@pytest.mark.quick(
    "None-alone-masked",
    "None-with its base-within no_grad",
    "None-two views-masked",
    "None-a diagonal-multiplied",
    "*1MB-*-multiplied",
)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("budget", [None, "1MB"])
def test_outputs_are_written_to_as_in_eager(way: str, write: str, budget: str | None) -> None:
    torch.manual_seed(0)
    model, x = _Model(WAYS[way]), torch.randn(2, 2, 3)
    expected = _run(model, list(model.parameters()), WRITES[write], x)
    model.zero_grad()
    found = _run(memopt.compile(model, budget, backend="aten"), list(model.parameters()), WRITES[write], x)
    torch.testing.assert_close(found, expected)


@pytest.mark.quick("flat")
@pytest.mark.parametrize("way", ["two views", "flat", "beside a piece"])
def test_code_of_inductor_returns_what_may_be_written_to(way: str) -> None:
    torch.manual_seed(0)
    model, x = _Model(WAYS[way]), torch.randn(2, 2, 3)
    expected = _run(model, list(model.parameters()), WRITES["multiplied"], x)
    model.zero_grad()
    found = _run(memopt.compile(model, backend="inductor"), list(model.parameters()), WRITES["multiplied"], x)
    torch.testing.assert_close(found, expected)


@pytest.mark.quick("view-inductor", "mT-aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("way", ["mT", "T", "view"])
def test_a_write_to_a_view_of_what_is_saved_spoils_no_gradient(backend: str, way: str) -> None:
    views: dict[str, Callable[[Tensor], Any]] = {
        "mT": lambda y: (y.sigmoid().mT, y),
        "T": lambda y: (y.sigmoid().flatten(1).T, y.sum()),
        "view": lambda y: (functional.softmax(y, -1).view(-1),),
    }
    model, x = _Model(views[way]), torch.randn(2, 3)
    (expected,) = torch.autograd.grad(model(x)[0].sum(), [model.linear.bias])
    out = memopt.compile(model, backend=backend)(x)
    with torch.no_grad():
        out[0].mul_(2)
    try:
        out[0].sum().backward()
    except RuntimeError as error:
        assert re.search(r"modified by an inplace operation|between forward and backward", str(error))
    else:  # another value is saved
        torch.testing.assert_close(model.linear.bias.grad, expected)


class _Complex(nn.Module):
    """A buffer of complex numbers, of which parts are written to."""

    def __init__(self, step: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step
        self.register_buffer("kept", torch.zeros(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Any:
        return self.step(self.linear(x), self.kept)


def _parts(y: Tensor, kept: Tensor) -> Any:
    with torch.no_grad():
        kept.real.add_(1)
        kept.imag[0] = 3.0
    return (y * kept.real + kept.imag,)


def _conjugate(y: Tensor, _: Tensor) -> Any:
    z = torch.complex(y, y.square()).conj()
    return z.sin(), z.imag, z.real


@pytest.mark.parametrize("step", [_parts, _conjugate])
def test_what_is_saved_may_show_complex_memory_as_real_or_negated(step: Callable[[Tensor, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model, x = _Complex(step), torch.randn(2, 4)
    found = []
    for call in (model, memopt.compile(model, "1MB", backend="aten")):
        model.zero_grad()
        model.kept.zero_()
        out = call(x)
        sum(value.abs().square().sum() for value in out).backward()
        found.append([*(value.detach() for value in out), model.linear.weight.grad, model.kept.clone()])
    torch.testing.assert_close(found[1], found[0])
