"""Steps planned for the gradients of a loss alone: only where nothing else keeps the budget, and never silently."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.budget import BudgetError
from memopt.capture.loss_alone import attached
from memopt.compilation.session import Session
from memopt.step import budget_trial
from memopt.step.by_loss_alone import ByLossAlone

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


X, LABELS = torch.linspace(-1, 1, 64 * 16).reshape(64, 16), torch.arange(64) % 11
WORDS = "gradients of the loss alone"


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    cache: tuple[torch.Tensor, ...]


class Model(nn.Module):
    """Returns, beside its loss, its logits and what a cache is made of, as models of transformers do."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.head = kind, nn.Linear(16, 16), nn.Linear(16, 400)

    def forward(self, x, labels):
        hidden = self.first(x).tanh()
        logits = self.head(hidden)
        loss = F.cross_entropy(logits, labels)
        if self.kind == "two losses":
            return loss, logits.square().mean(), logits
        if self.kind == "no loss":
            return logits, hidden
        return Output(loss, logits, (hidden, hidden))


def least(model, **options) -> int:
    """The minimum that a refusal names."""
    with pytest.raises(memopt.BudgetError) as refused:
        memopt.compile(model, "1kB", backend="aten", **options)(X, LABELS)
    return refused.value.minimum_bytes


def steps(called, model, optimizer):
    found = []
    for _ in range(3):
        out = called(X, LABELS)
        found.append((out.loss.detach(), out.logits.requires_grad, out.cache[0] is out.cache[1]))
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del out  # else it is there beside the next step
    return found, [parameter.detach() for parameter in model.parameters()]


def test_a_budget_that_is_refused_else_is_kept_with_the_same_numbers():
    model = Model()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
    all_of_them = least(Model(), verify="full")  # which compares the gradients of all outputs
    budget = least(Model())
    assert budget < 0.9 * all_of_them
    run = memopt.compile(model, f"{budget}B", backend="aten", optimizer=optimizers[0])
    torch.testing.assert_close(steps(run, model, optimizers[0]), steps(twin, twin, optimizers[1]))
    assert run.report.peak_bytes <= budget
    assert any(WORDS in note for note in run.report.notes)
    assert memopt.plan(Model(), (X, LABELS), budget, backend="aten").peak_bytes <= budget


def test_a_later_run_of_the_script_plans_so_at_once(monkeypatch):
    budget, planned = least(Model()), []
    plain = Session.plan_training
    monkeypatch.setattr(Session, "plan_training", lambda *args, **kwargs: planned.append(0) or plain(*args, **kwargs))
    for times in (2, 1):
        torch._dynamo.reset()
        planned.clear()
        run = memopt.compile(Model(), f"{budget}B", backend="aten")
        out = run(X, LABELS)
        out.loss.backward()
        assert out.logits is not None and len(planned) == times
        assert any(WORDS in note for note in run.report.notes)


def test_a_gradient_of_something_else_is_refused_in_one_line():
    model = Model()
    run = memopt.compile(model, f"{least(Model())}B", backend="aten")
    out = run(X, LABELS)
    with pytest.raises(RuntimeError, match=rf"{WORDS}, and output \d of the model's graph has one, too: .* budget of"):
        (out.loss + out.logits.sum()).backward()


def test_outputs_may_be_written_to_and_have_no_gradients_in_inference(monkeypatch):
    run = memopt.compile(Model(), f"{least(Model())}B", backend="aten")
    out = run(X, LABELS)
    with torch.no_grad():
        out.logits.mul_(2)
    (out.logits + 1).mul_(2)
    out.loss.backward()
    torch._dynamo.reset()
    refused = BudgetError(1_000_000, 1)  # chunks of a loss in inference take more than those in training
    monkeypatch.setattr(ByLossAlone, "remembers", lambda self: not self.needed and self.refused(refused))
    run = memopt.compile(Model(), "10MB", backend="aten")
    run(X, LABELS).loss.backward()
    assert any(WORDS in note for note in run.report.notes)
    with torch.no_grad():
        assert not run(X, LABELS).logits.requires_grad


def test_all_gradients_are_planned_for_where_there_is_room():
    model = Model()
    run = memopt.compile(model, "10MB", backend="aten")
    found = run(X, LABELS)
    (found.loss + found.logits.square().mean()).backward()
    assert not any(WORDS in note for note in run.report.notes)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected = model(X, LABELS)
    (expected.loss + expected.logits.square().mean()).backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()])


@pytest.mark.parametrize("kind", ["two losses", "no loss"])
def test_it_is_not_done_where_it_is_not_known_what_the_loss_is(kind):
    run = memopt.compile(Model(kind), "1kB", backend="aten")
    with pytest.raises(memopt.BudgetError):
        run(X, LABELS)
    assert not any(any(run._memopt.sessions[plan].fallbacks.by_loss_alone.stage) for plan in run._memopt.sessions)


def test_an_output_that_is_returned_twice_is_one():
    value = torch.ones(3)
    found = attached(lambda: [torch.zeros(()), value, value], (1, 2), "1 MB")()
    assert found[1] is found[2] and found[1].requires_grad and found[1].data_ptr() == value.data_ptr()


@pytest.mark.skipif(missing_compiler(torch.device("cpu")) is not None, reason="no C++ compiler")
def test_code_for_many_sizes_refuses_such_a_gradient_too(monkeypatch):
    monkeypatch.setattr(
        ByLossAlone, "remembers", lambda self: not self.needed and bool(self.refused(BudgetError(1_000_000, 1)))
    )
    run = memopt.compile(Model(), "10MB", backend="inductor", dynamic=True)
    out = run(X, LABELS)
    assert out.logits.requires_grad
    with pytest.raises(RuntimeError, match=WORDS):
        out.logits.sum().backward()


def test_a_minimum_that_is_not_the_last_word_is_not_run(monkeypatch):
    """It is more than the budget, which the step that is planned then keeps from its first byte on."""
    named, real = [], budget_trial.refused_as_tried
    monkeypatch.setattr(
        budget_trial, "refused_as_tried", lambda *args: named.append(real(*args).minimum_bytes) or real(*args)
    )
    budget = least(Model())
    assert named == [budget]
    run = memopt.compile(Model(), f"{budget}B", backend="aten")
    run(X, LABELS).loss.backward()
    assert any(WORDS in note for note in run.report.notes)
    assert named == [budget]
