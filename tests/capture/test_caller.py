"""What the caller's bytecode proves of the result of a call."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.capture import caller
from memopt.torch_compat.not_returned import NotReturned
from tests.capture.test_loss_alone import LABELS, Model, X
from tests.inductor.test_peak_lower_bound import needs_compiler


def gradients(step: Callable[[], torch.Tensor], model: nn.Module) -> list[Any]:
    model.zero_grad()
    step().backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def train(called: Any, optimizer: torch.optim.Optimizer) -> None:
    """Without an assertion: pytest has functions with one ask for all of their variables."""
    for _ in range(7):
        loss = called(X, LABELS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("engine", ["aten", pytest.param("inductor", marks=needs_compiler)])
def test_a_loop_that_takes_the_loss_alone_is_planned_for_it(engine: str) -> None:
    model, twin = Model(), Model()
    run = memopt.compile(model, "10MB", backend=engine, optimizer=(first := torch.optim.SGD(model.parameters(), 0.1)))
    train(run, first)
    train(twin, torch.optim.SGD(twin.parameters(), 0.1))
    torch.testing.assert_close(list(model.parameters()), list(twin.parameters()))
    general = memopt.compile(Model(), "10MB", backend=engine)
    out = general(X, LABELS)
    (out.loss + out.logits.sum()).backward()
    large = X.shape[0] * 400 * 4  # the logits, which are not made whole
    assert run.report.peak_bytes <= general.report.peak_bytes - large


def test_what_stands_for_outputs_shows_no_numbers() -> None:
    stand = NotReturned.like(torch.ones(3, 4).t())
    assert stand.shape == (4, 3) and stand.stride() == (1, 4) and isinstance(stand.exp(), torch.Tensor)
    with pytest.raises((RuntimeError, NotImplementedError)):
        stand.sum().item()
    with pytest.raises((RuntimeError, NotImplementedError)):
        stand + torch.ones(4, 3)


def test_gradients_of_the_loss_are_those_of_eager() -> None:
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    mine = gradients(lambda: run(X, LABELS).loss, model)
    torch.testing.assert_close(mine, gradients(lambda: model(X, LABELS).loss, model))
    assert any(
        "test_caller.py:" in note and "nothing else of what the model returns" in note for note in run.report.notes
    )
    general = memopt.compile(Model(), "10MB", backend="aten")
    out = general(X, LABELS)
    (out.loss + out.logits.sum()).backward()
    assert not any("loss alone" in note for note in general.report.notes)
    assert run.report.peak_bytes < general.report.peak_bytes


class Wrapper(nn.Module):
    """As libraries wrap models: it passes on what they return."""

    def __init__(self, run: nn.Module) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(*args)


def every(run: Any) -> Any:
    return [*map(lambda x: run(x, LABELS), [X, X])][0].logits  # noqa: C417, RUF015 - as users write it


def mapped(run: Any) -> Any:
    return list(map(run, [X], [LABELS]))[0].logits  # noqa: RUF015 - as users write it


def cached(run: Any) -> Any:
    once = functools.lru_cache(lambda number: run(X, LABELS))
    return once(0).loss + once(0).logits.sum()


def wrapped(run: Any) -> Any:
    kept = Wrapper(run)(X, LABELS)
    return kept.loss + kept.logits.sum()


@pytest.mark.parametrize("take", [every, mapped, cached, wrapped])
def test_of_functions_between_it_is_not_known_what_they_do(take: Callable[[Any], Any]) -> None:
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    torch.testing.assert_close(gradients(lambda: take(run).sum(), model), gradients(lambda: take(model).sum(), model))
    assert not any("nothing else" in note for note in run.report.notes)


BATCH = {"x": X, "labels": LABELS}
WAYS: dict[str, Callable[[Any], Any]] = {
    "by names": lambda run: run(x=X, labels=LABELS)["loss"],
    "a batch": lambda run: run(**BATCH)["loss"],
    "a tuple": lambda run: run(*BATCH.values())["loss"],
    "both": lambda run: run(X, **{"labels": LABELS})["loss"],
    "conditions": lambda run: run(X if X is not None else 0, LABELS)["loss"],
}


class Named(Model):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        out = super().forward(x, labels)
        return {"loss": out.loss, "logits": out.logits}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no places")
@pytest.mark.parametrize("way", list(WAYS))
def test_a_call_may_have_arguments_of_any_kind(way: str) -> None:
    model = Named()
    run = memopt.compile(model, "10MB", backend="aten")
    torch.testing.assert_close(gradients(lambda: WAYS[way](run), model), gradients(lambda: WAYS[way](model), model))
    assert any("nothing else" in note for note in run.report.notes)


def lets_go(run: Any) -> list[Any]:
    found = []
    for _ in range(6):
        kept = torch.ones(8)
        seen = weakref.ref(kept)
        loss = run(X, LABELS).loss
        del kept
        found.append(seen())
        loss.backward()
    return found


def test_what_the_caller_lets_go_of_is_gone() -> None:
    """Asking for a function's variables would keep them, as Python copies them for that."""
    run = memopt.compile(Model(), "10MB", backend="aten")
    assert lets_go(run) == [None] * 6
    assert any("nothing else" in note for note in run.report.notes)


def test_code_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call is asked for each time: torch's own functions around it have hundreds of instructions."""
    model, looked = Model(), list[Any]()
    run = memopt.compile(model, "10MB", backend="aten")

    def step() -> None:
        run(X, LABELS).loss.backward()

    for _ in range(2):
        step()
    monkeypatch.setattr(caller, "Sites", lambda *code: looked.append(code))
    for _ in range(6):
        step()
    assert not looked and any("nothing else" in note for note in run.report.notes)


def test_a_stand_in_is_called_by_attributes_as_well() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = memopt.compile(Model(), "10MB", backend="aten")

        def step(self) -> None:
            self.model(X, LABELS).loss.backward()

    trainer = Trainer()
    trainer.step()
    assert any("test_caller.py:" in note for note in trainer.model.report.notes)


class Computed:
    """Its loss is computed of its logits where it is asked for."""

    def __init__(self, logits: torch.Tensor, aside: torch.Tensor, labels: torch.Tensor) -> None:
        self.logits, self.aside, self.labels = logits, aside, labels

    @property
    def loss(self) -> torch.Tensor:
        return F.cross_entropy(self.logits, self.labels) + self.aside


class Others(Model):
    """Returns one scalar that has a gradient, which is not what its callers take."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.first(x).tanh())
        aside = logits.square().mean()
        if self.kind == "first":
            return logits, aside
        if self.kind == "property":
            return Computed(logits, aside, labels)
        each = F.cross_entropy(logits, labels, reduction="none")
        return {"loss": {"each": each} if self.kind == "dict" else each, "aside": aside, "logits": logits}


TAKES: dict[str, Callable[[Any], Any]] = {
    "first": lambda run: F.cross_entropy(run(X, LABELS)[0], LABELS),
    "property": lambda run: run(X, LABELS).loss,
    "dict": lambda run: run(X, LABELS)["loss"]["each"].mean(),
    "each": lambda run: run(X, LABELS)["loss"].mean(),
}


@pytest.mark.parametrize("kind", list(TAKES))
def test_what_is_taken_may_be_no_loss(kind: str) -> None:
    model = Others(kind)
    run = memopt.compile(model, "10MB", backend="aten")
    for _ in range(6):
        mine = gradients(lambda: TAKES[kind](run), model)
        torch.testing.assert_close(mine, gradients(lambda: TAKES[kind](model), model))
    assert not any("nothing else" in note for note in run.report.notes)


def test_other_uses_have_plans_of_their_own() -> None:
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    for _ in range(6):
        gradients(lambda: run(X, LABELS).loss, model)
        model.zero_grad()  # beside gradients that exist an evaluation has a plan of its own
        with torch.no_grad():
            assert run(X, LABELS).loss.isfinite()
    assert [plan[-1] for plan in run._memopt.sessions] == ["attribute"]
    assert any("nothing else" in note for note in run.report.notes)


def test_hooks_on_the_stand_in_may_take_more() -> None:
    run = memopt.compile(Model(), "10MB", backend="aten")
    kept: list[Any] = []
    run.register_forward_hook(lambda module, given, out: kept.append(out.logits))
    loss = run(X, LABELS).loss
    (loss + kept[0].sum()).backward()
    assert not any("loss alone" in note for note in run.report.notes)


def test_hooks_of_the_model_may_take_more() -> None:
    model, kept = Model(), list[Any]()
    run = memopt.compile(model, "10MB", backend="aten")
    gradients(lambda: run(X, LABELS).loss, model)
    model.register_forward_hook(lambda module, given, out: kept.append(out.logits))
    loss = run(X, LABELS).loss
    torch.testing.assert_close(kept[-1], model(X, LABELS).logits)
    (loss + kept[0].sum()).backward()


class Tagged(Model):
    """Gives its loss an attribute, as a criterion may tell of what it was made."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        out = super().forward(x, labels)
        out.loss.of = out.logits
        return out


def test_what_a_loss_has_in_its_attributes_is_made() -> None:
    model = Tagged()
    run = memopt.compile(model, "10MB", backend="aten")
    torch.testing.assert_close(run(X, LABELS).loss.of, model(X, LABELS).logits)


def asks_for_variables(run: Any, rate: float = 0.1) -> dict[str, Any]:
    settings = locals()
    run(X, LABELS).loss.backward()
    return settings


def shows_variables(run: Any, rate: float = 0.1) -> dict[str, Any]:
    settings = (lambda: sys._getframe(1).f_locals)()
    run(X, LABELS).loss.backward()
    return settings


@pytest.mark.parametrize("function", [asks_for_variables, shows_variables])
def test_the_caller_keeps_what_it_has_of_its_variables(function: Callable[[Any], Any]) -> None:
    """Before Python 3.13 it is the very dictionary of the frame."""
    assert function(memopt.compile(Model(), "10MB", backend="aten"))["rate"] == 0.1


class Looper:
    """Its steps are counted behind the model's call, before its result comes to who asks for the count."""

    def __init__(self, run: Any) -> None:
        self.run, self.steps = run, 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        self.steps += 1

    def call(self) -> Any:
        with self:
            return self.run(X, LABELS)

    def step(self) -> Any:
        out = self.call()
        return out.logits.sum() if self.steps > 1 else out.loss


def test_attributes_are_not_asked_before_code_that_sets_them() -> None:
    model, twin = Model(), Model()
    mine, eager = Looper(memopt.compile(model, "10MB", backend="aten")), Looper(twin)
    for _ in range(3):
        torch.testing.assert_close(gradients(mine.step, model), gradients(eager.step, twin))


class Aside(Model):
    """Its own attribute has a gradient, too."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        out = super().forward(x, labels)
        self.aside = out.logits.square().mean()
        return out


def test_what_a_model_keeps_is_used_beside_what_it_returns() -> None:
    model = Aside()
    run = memopt.compile(model, "10MB", backend="aten")
    mine = gradients(lambda: run(X, LABELS).loss + model.aside, model)
    torch.testing.assert_close(mine, gradients(lambda: model(X, LABELS).loss + model.aside, model))


def test_a_call_elsewhere_is_planned_for_all_that_it_returns() -> None:
    """Each call is asked for, not the first one alone."""
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    for _ in range(6):
        gradients(lambda: run(X, LABELS).loss, model)
    out = run(X, LABELS)
    torch.testing.assert_close(out.logits, model(X, LABELS).logits)
    mine = gradients(lambda: (kept := run(X, LABELS)).loss + kept.logits.sum(), model)
    eager = model(X, LABELS)
    torch.testing.assert_close(mine, gradients(lambda: eager.loss + eager.logits.sum(), model))
    with torch.no_grad():
        torch.testing.assert_close(run(X, LABELS).logits, eager.logits)
    for _ in range(3):
        gradients(lambda: run(X, LABELS).loss, model)


def test_a_plan_for_all_serves_every_caller() -> None:
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    out = run(X, LABELS)
    (out.loss + out.logits.sum()).backward()
    gradients(lambda: run(X, LABELS).loss, model)
    assert len([plan for plan in run._memopt.sessions if plan[-1]]) == 0
