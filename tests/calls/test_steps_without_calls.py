"""Steps on gradients that no call of the compiled model has made are said, once, and no others."""

from __future__ import annotations

import logging
import weakref

import pytest
import torch
from torch import nn

import memopt
from memopt.in_place import compile_in_place, stand_in_of, undo

X = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.layers = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8), nn.Tanh()])

    def forward(self, x):
        x = self.encoder(x)
        for layer in self.layers:
            x = layer(x)
        return x


def layers_by_themselves(compiled, model):
    x = X
    for layer in compiled.layers:
        x = layer(x)
    return x


APART = {
    "a part": lambda compiled, model: compiled.encoder(X),
    "layers": layers_by_themselves,
    "the model that was given": lambda compiled, model: model(X),
}
CALLED = {
    "a call": lambda compiled, model: compiled(X),
    "a call and a part": lambda compiled, model: compiled.encoder(compiled(X)),
    "a part, then a call": lambda compiled, model: compiled(compiled.encoder(X)),
    "two calls": lambda compiled, model: compiled(X) + compiled(X),
}


def said(caplog):
    return [record.message for record in caplog.records if "without a call" in record.message]


def trained(run, budget="100MB", steps=3, keep=False, optimizers=1):
    torch.manual_seed(0)
    model = Net()
    stepping = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]
    compiled = memopt.compile(model, budget, backend="aten")
    for _ in range(steps):
        run(compiled, model).square().mean().backward()
        for optimizer in stepping:
            optimizer.step()
        model.zero_grad(set_to_none=not keep)
    return compiled


@pytest.mark.parametrize("run", APART.values(), ids=APART.keys())
@pytest.mark.parametrize("budget", ["100MB", 1.0])
def test_a_step_without_a_call_is_said_once(caplog, run, budget):
    compiled = trained(run, budget)
    (line,) = said(caplog)
    assert line.startswith("memopt: an optimizer of Net has stepped on gradients that came without a call")
    with pytest.raises(RuntimeError, match="nothing is planned: an optimizer of Net has stepped"):
        _ = compiled.report
    compiled(X).sum().backward()
    assert any("without a call of the compiled model" in note for note in compiled.report.notes)


@pytest.mark.quick("False-1-a call", "False-1-two calls", "True-1-a part, then a call", "False-2-a call and a part")
@pytest.mark.parametrize("run", CALLED.values(), ids=CALLED.keys())
@pytest.mark.parametrize(("keep", "optimizers"), [(False, 1), (True, 1), (False, 2)])
def test_a_step_with_a_call_is_not(caplog, run, keep, optimizers):
    trained(run, keep=keep, optimizers=optimizers)
    assert not said(caplog)


def test_a_part_is_said_once_calls_are_over(caplog):
    trained(lambda compiled, model: compiled(X))
    model = Net()
    compiled, optimizer = memopt.compile(model, "100MB", backend="aten"), torch.optim.SGD(model.parameters())
    for run, lines in ((compiled, 0), (compiled.encoder, 1), (compiled, 1), (compiled.encoder, 1)):
        run(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(said(caplog)) == lines


def test_without_a_budget_nothing_is_said(caplog):
    trained(APART["a part"], budget=None)
    assert not said(caplog)


def test_steps_on_no_gradients_zeros_or_those_of_before_are_not_said(caplog):
    model = Net()
    compiled, optimizer = memopt.compile(model, "100MB", backend="aten"), torch.optim.Adam(model.parameters())
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    compiled(X).sum().backward()
    optimizer.step()
    optimizer.step()
    assert not said(caplog)


def test_gradients_may_be_sparse(caplog):
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4))
    compiled, optimizer = memopt.compile(model, "100MB", backend="aten"), torch.optim.SGD(model.parameters())
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    assert len(said(caplog)) == 1 and compiled is not None


def test_nobody_holds_a_reference_to_gradients(caplog):
    model = Net()
    compiled, optimizer = memopt.compile(model, "100MB", backend="aten"), torch.optim.SGD(model.parameters())
    compiled(X).sum().backward()
    optimizer.step()
    # `torch.utils.swap_tensors` would refuse to swap them.
    assert not any(weakref.getweakrefcount(parameter.grad) for parameter in model.parameters())


def test_another_compiled_model_may_train_the_same_weights(caplog):
    model = Net()
    memopt.compile(model.encoder, "100MB", backend="aten")
    whole, optimizer = memopt.compile(model, backend="aten"), torch.optim.SGD(model.parameters())
    whole(X).sum().backward()
    optimizer.step()
    assert not said(caplog)


def test_optimizers_of_other_models_are_not_said(caplog):
    compiled, other = memopt.compile(Net(), "100MB", backend="aten"), Net()
    optimizer = torch.optim.SGD(other.parameters())
    other(X).sum().backward()
    optimizer.step()
    assert not said(caplog) and compiled is not None


def test_a_model_that_is_compiled_no_more_is_not_said(caplog):
    model = Net()
    compile_in_place(model, "100MB", backend="aten")
    optimizer = torch.optim.SGD(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    stand_in = stand_in_of(model)
    undo(model)
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()
    assert not said(caplog) and stand_in is not None


@pytest.fixture(autouse=True)
def _heard(caplog):
    caplog.set_level(logging.WARNING, "memopt")
