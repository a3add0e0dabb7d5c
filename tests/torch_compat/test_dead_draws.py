"""Random numbers that nothing reads are drawn all the same: the stream after a call, and after backward, is eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda x: x * (torch.rand(x.shape) > 0.3),
    "a dropout": lambda x: functional.dropout(x, 0.4, True),
    "a dropout of what was computed": lambda x: functional.dropout(x.sin().cos(), 0.4, True),
    "for another draw": lambda x: functional.dropout((x * torch.rand(x.shape)).sum(-1), 0.4, True),
    "for another draw in place": lambda x: functional.dropout(x, 0.4, True).sin().bernoulli_(),
    "noise in place": lambda x: x.clone().normal_(),
    "two": lambda x: torch.randperm(4) + functional.dropout(x, 0.4, True).sum(),
}


class Drawing(nn.Module):
    """Draws in vain, before and after what it uses."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        self.draw(x)
        y = functional.dropout(self.layer(x), 0.2, True)
        self.draw(y)
        return y


def stream(call: nn.Module, x: Tensor, backward: bool) -> list[Tensor]:
    """What a step draws, and the numbers that follow it."""
    torch.default_generator.manual_seed(0)
    out = call(x)
    found = [out.detach(), torch.rand(1)]
    if backward:
        out.sum().backward()
    return [*found, torch.rand(1)]


@pytest.mark.quick("1.0-two", "None-noise in place", "1.0-a mask", "None-a dropout of what was computed")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("budget", [None, 1.0])
def test_training_draws_in_vain_as_eager_does(draw: Callable[[Tensor], Tensor], budget: float | None) -> None:
    torch._dynamo.reset()
    model, x = Drawing(draw), torch.randn(4, 4, requires_grad=True)
    compiled = memopt.compile(model, budget, backend="aten")
    expected = stream(model, x, True)
    for _ in range(2):
        assert all(map(torch.equal, stream(compiled, x, True), expected))


@pytest.mark.quick("static-two", "static-noise in place", "aten-a mask", "aten-for another draw")
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("backend", ["aten", "static"])
def test_inference_draws_in_vain_as_eager_does(draw: Callable[[Tensor], Tensor], backend: str) -> None:
    torch._dynamo.reset()
    model, x = Drawing(draw), torch.randn(4, 4)
    compiled = memopt.compile(model, backend=backend)
    with torch.no_grad():
        expected = stream(model, x, False)
        for _ in range(2):
            assert all(map(torch.equal, stream(compiled, x, False), expected))
