"""A graph that Dynamo captures again, for a guard that nothing of it depends on, is not lowered a second time."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.aten import AtenBackend
from memopt.capture.dynamo import Hooks
from tests.inductor.test_peak_lower_bound import needs_compiler


class Classifier(nn.Module):
    """Notes in its first call of which kind its labels are, as transformers' classes that classify do."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 8))
        self.config = types.SimpleNamespace(kind=None, scale=scale)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.config.kind is None:
            self.config.kind = "one label"
        loss = torch.nn.functional.cross_entropy(self.body(x), labels)
        return loss * self.config.scale if self.config.kind == "one label" else loss


def losses(call: Callable[..., torch.Tensor], model: nn.Module, between: Callable[[int], None]) -> list[float]:
    """Of five steps, with something done between them."""
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        x, labels = torch.randn(512, 32, generator=generator), torch.randint(8, (512,), generator=generator)
        loss = call(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        between(number)
    return found


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each graph that the engine aten lowers."""
    lowered, plain = [], AtenBackend.compile_captured

    def compile_captured(self: AtenBackend, graph: Any, inputs: Any, hooks: Hooks) -> Any:
        lowered.extend([] if hooks.dry else [1])
        return plain(self, graph, inputs, hooks)

    monkeypatch.setattr(AtenBackend, "compile_captured", compile_captured)
    return lowered


@pytest.mark.parametrize("budget", [None, 0.9])
def test_what_was_lowered_runs_the_graph_that_is_captured_again(
    budget: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered, model, twin = counted(monkeypatch), Classifier(), Classifier()
    compiled = memopt.compile(model, budget=budget, backend="aten")
    torch.testing.assert_close(losses(compiled, model, lambda _: None), losses(twin, twin, lambda _: None))
    assert model.config.kind == "one label" and len(lowered) == 1


def test_a_graph_that_differs_is_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, model, twin = counted(monkeypatch), Classifier(), Classifier()

    def changed(of: Classifier) -> Callable[[int], None]:
        return lambda number: of.config.__dict__.update(scale=2.0 if number > 1 else 1.0)

    found = losses(memopt.compile(model, budget=0.9, backend="aten"), model, changed(model))
    torch.testing.assert_close(found, losses(twin, twin, changed(twin)))
    assert len(lowered) == 2


def test_under_autocast_code_of_float32_does_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered, model = counted(monkeypatch), Classifier()
    compiled = memopt.compile(model, backend="aten")
    x, labels = torch.randn(512, 32), torch.randint(8, (512,))
    compiled(x, labels).backward()
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x, labels).backward()
    assert len(lowered) == 2


@needs_compiler
def test_code_of_inductor_runs_again_with_the_numbers_of_eager() -> None:
    model, twin = Classifier(), Classifier()
    compiled = memopt.compile(model, budget=0.9, backend="inductor")
    torch.testing.assert_close(losses(compiled, model, lambda _: None), losses(twin, twin, lambda _: None))
    assert model.config.kind == "one label"
