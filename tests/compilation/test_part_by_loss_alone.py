"""Of a call of several graphs, the one that makes the loss is planned for it alone where nothing else is used."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

X, LABELS = torch.linspace(-1, 1, 64 * 16).reshape(64, 16), torch.arange(64) % 11
WORDS = "planned for gradients of the loss alone"


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 2000)

    def forward(self, hidden, labels):
        logits = self.linear(hidden)
        return F.cross_entropy(logits, labels), logits


class Broken(nn.Module):
    """Its graph breaks before its head, and `kind` says what it does with the logits after that."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.first, self.head, self.logs, self.log = kind, nn.Linear(16, 16), Head(), [], False

    def forward(self, x, labels):
        hidden = self.first(x).tanh()
        torch._dynamo.graph_break()
        loss, logits = self.head(hidden, labels)
        torch._dynamo.graph_break()
        if self.kind == "in the loss":
            loss = loss + 1e-3 * logits.square().mean()
        elif self.kind == "logged":
            self.mean = logits.detach().mean()
        elif self.kind == "kept":
            self.logs[:] = [logits]
        elif self.log:
            self.mean = float(logits.detach().mean())
        return Output(loss, logits)


def trained(run, model):
    """Losses of three steps, and the parameters after these; the loop takes nothing but the loss."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        loss = run(X, LABELS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [parameter.detach() for parameter in model.parameters()]


def planned_for_it(run):
    return any(WORDS in note for note in run.report.notes)


def minimum(model, take):
    """The least that a refusal of a budget names; `take` is the loop's code."""
    with pytest.raises(memopt.BudgetError) as refused:
        take(memopt.compile(model, "1kB", backend="aten"))
    return refused.value.minimum_bytes


def test_logits_are_not_made_and_the_numbers_are_eager_s():
    least = minimum(Broken(), lambda run: trained(run, Broken()))
    torch._dynamo.reset()

    def all_of_it(run):
        out = run(X, LABELS)
        return out.loss, out.logits

    assert least < 0.6 * minimum(Broken(), all_of_it)
    torch._dynamo.reset()
    model = Broken()
    run = memopt.compile(model, f"{least}B", backend="aten")
    found, twin = trained(run, model), Broken()  # which is beside the step where it is made before
    torch.testing.assert_close(found, trained(twin, twin))
    assert planned_for_it(run) and run.report.peak_bytes <= least


def test_without_gradients_all_is_made():
    model = Broken()
    run = memopt.compile(model, "10MB", backend="aten")
    trained(run, model)
    with torch.no_grad():
        torch.testing.assert_close(run(X, LABELS).logits, model(X, LABELS).logits)


@pytest.mark.parametrize("kind", ["in the loss", "logged", "kept"])
def test_what_the_model_itself_uses_is_made(kind):
    model = Broken(kind)
    twin = copy.deepcopy(model)
    run = memopt.compile(model, "10MB", backend="aten")
    torch.testing.assert_close(trained(run, model), trained(twin, twin))
    if kind == "in the loss":
        assert not planned_for_it(run)
    elif kind == "logged":
        assert model.mean.item() == pytest.approx(twin.mean.item(), rel=1e-5)
    else:
        torch.testing.assert_close(model.logs, twin.logs)


def test_what_the_model_uses_from_some_step_on_is_an_error_and_no_number():
    model = Broken()
    run = memopt.compile(model, "10MB", backend="aten")
    trained(run, model)
    assert planned_for_it(run)
    model.log = True
    with pytest.raises(RuntimeError, match="called on an output that memopt has left out"):
        trained(run, model)


def test_a_loop_that_takes_more_is_planned_for_all_of_it():
    model = Broken()
    run = memopt.compile(model, "10MB", backend="aten")
    out = run(X, LABELS)
    (out.loss + out.logits.square().mean()).backward()
    assert not planned_for_it(run)
    twin = Broken()
    out = twin(X, LABELS)
    (out.loss + out.logits.square().mean()).backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
