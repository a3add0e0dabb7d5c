"""What the caller's bytecode proves of the result of a call."""

from __future__ import annotations

import functools
import subprocess
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


class Result:
    loss, logits = 1, 2

    def __getitem__(self, key: Any) -> int:
        return 1


def call(*args: Any, **kwargs: Any) -> Result:
    frame = sys._getframe(1)
    found.append(bool(caller._use(frame.f_code, frame.f_lasti)))
    return Result()


found: list[bool] = []


def attribute() -> Any:
    return call(x=1).loss


def key() -> Any:
    return call()["loss"] * 2


def first() -> Any:
    return call(*[])[0]


def variable() -> Any:
    out = call(**{})
    loss = out.loss
    return loss


def in_a_block() -> Any:
    with torch.no_grad():
        out = call(**{"a": 1})
        loss = out["loss"] * 2
    del out
    return loss


def twice() -> Any:
    out = call()
    one, other = out.loss, out.loss
    return one, other


def another_attribute() -> Any:
    return call().logits


def another_place() -> Any:
    return call()[1]


def also_later() -> Any:
    out = call()
    loss = out.loss
    return loss + out.logits


def passed_on() -> Any:
    out = call()
    str(out.loss)
    return out


def in_a_closure() -> Any:
    out = call()
    return lambda: out.loss


def a_method() -> Any:
    return getattr(call(), "loss")  # noqa: B009 - another name might stand there


@pytest.mark.parametrize("function", [attribute, key, first, variable, in_a_block, twice])
def test_a_loss_that_is_all_that_is_taken(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert found == [True]


@pytest.mark.parametrize("function", [another_attribute, another_place, also_later, passed_on, in_a_closure, a_method])
def test_more_may_be_taken(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert found == [False]


def test_variables_of_a_script_may_be_read_elsewhere() -> None:
    """By other modules, by the next lines of a prompt."""
    script = "from tests.capture.test_caller import call, found\nout = call()\nloss = out.loss\nprint(found)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == str([False])


def reads_all() -> Any:
    out = call()
    loss = out.loss
    return loss, locals()["out"]


def evaluates() -> Any:
    out = call()
    loss = out.loss
    return loss, eval("out")


@pytest.mark.parametrize("function", [reads_all, evaluates])
def test_variables_that_are_read_by_name_may_be_any(function: Callable[[], Any]) -> None:
    found.clear()
    function()
    assert found == [False]


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
    monkeypatch.setattr(caller, "_instructions", looked.append)
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
