"""Loops that use no gradient but the loss's are planned for that from their second step on, and back where one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.compilation.fallbacks import Fallbacks
from tests.capture.test_loss_alone import LABELS, WORDS, Model, X


@pytest.fixture(autouse=True)
def _every_plan_recomputes_much(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr("memopt.compilation.fallbacks._MUCH", -1.0)


def loop(run: nn.Module, model: nn.Module, extra: Callable[[int, Any], Any]) -> list[Any]:
    """Gradients of some steps; the outputs are passed to a function, so that the code proves nothing of them."""
    found = []
    for number in range(4):
        model.zero_grad()
        out = run(X, LABELS)
        loss = extra(number, out)
        loss.backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        del out, loss
    return found


def test_steps_are_planned_for_the_loss_alone_once_one_was_seen() -> None:
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    out = run(X, LABELS)
    out.loss.backward()
    assert out.logits.requires_grad
    del out
    general = run.report
    assert not any(WORDS in note for note in general.notes)
    mine = loop(run, model, lambda number, out: out.loss)
    assert any(WORDS in note and "the step before" in note for note in run.report.notes)
    assert run.report.peak_bytes < general.peak_bytes
    torch.testing.assert_close(mine, loop(model, model, lambda number, out: out.loss))


def test_a_loop_that_uses_others_keeps_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    gains, plain = [], Fallbacks.gains_by_loss_alone
    monkeypatch.setattr(
        Fallbacks,
        "gains_by_loss_alone",
        lambda *args: gains.append(plain(*args)) or gains[-1],  # type: ignore[func-returns-value]
    )
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")

    def extra(number: int, out: Any) -> Any:
        return out.loss + out.logits.square().mean()

    torch.testing.assert_close(loop(run, model, extra), loop(model, model, extra))
    assert not any(gains) and not any(WORDS in note for note in run.report.notes)


def test_another_gradient_later_is_refused_once_and_the_next_step_is_planned_for_all() -> None:
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    loop(run, model, lambda number, out: out.loss)
    refused = []

    def extra(number: int, out: Any) -> Any:
        return out.loss + out.logits.square().mean()

    for _ in range(3):
        model.zero_grad()
        total = extra(0, run(X, LABELS))
        try:
            total.backward()
        except RuntimeError as error:
            refused.append(str(error))
        del total
    assert len(refused) == 1 and "which the next step has" in refused[0]
    mine = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    extra(0, model(X, LABELS)).backward()
    torch.testing.assert_close(mine, [parameter.grad for parameter in model.parameters()])
    again = memopt.compile(Model(), "10MB", backend="aten")  # as a later run of the script
    for _ in range(3):
        extra(0, again(X, LABELS)).backward()
