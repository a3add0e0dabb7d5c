"""The compiled module beside the model that it stands for: names, state, copies, pickles, modes."""

import copy
import pickle

import pytest
import torch
from torch import nn

import memopt
from tests.end_to_end import build, step
from tests.test_surface import Counting, Small, X, compiled, gradients_of

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_parameters_and_names_are_the_model_s():
    model = Counting()
    run = compiled(model)
    assert [(n, id(p)) for n, p in run.named_parameters()] == [(n, id(p)) for n, p in model.named_parameters()]
    assert [(n, id(b)) for n, b in run.named_buffers()] == [(n, id(b)) for n, b in model.named_buffers()]
    assert list(run.state_dict()) == list(model.state_dict())
    assert run.first is model.first and isinstance(run, nn.Module)
    with pytest.raises(AttributeError, match="nowhere"):
        _ = run.nowhere
    with pytest.raises(RuntimeError, match="nothing is planned yet"):
        _ = run.report


def test_what_holds_modules_is_looked_into_as_the_model_is():
    layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    run = compiled(layers, "1MB")
    run(X).sum().backward()
    for again in (run, copy.deepcopy(run), copy.copy(run), pickle.loads(pickle.dumps(run))):
        assert isinstance(again, type(run)) and type(again).__name__ == "CompiledModule"
        assert len(again) == 3 and [type(layer) for layer in again] == [nn.Linear, nn.Tanh, nn.Linear]
        assert again[-1] is again._memopt.model[-1] and len(again[:2]) == 2 and again[1] in again and bool(again)
    assert list(run) == list(layers)
    named = compiled(nn.ModuleDict({"a": nn.Linear(8, 8)}))
    assert "a" in named and "b" not in named and named["a"] is named._memopt.model["a"] and list(named) == ["a"]
    plain = compiled(Small())
    assert plain and type(plain) is memopt.module.CompiledModule
    with pytest.raises(TypeError, match="len"):
        len(plain)
    with pytest.raises(TypeError, match="subscriptable"):
        plain[0]


def test_load_state_dict_reaches_the_model():
    model, other = Small().eval(), Small().eval()
    run = compiled(model)
    with torch.no_grad():
        run(X)
        result = run.load_state_dict(other.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
        torch.testing.assert_close(run(X), other(X))


def test_a_deep_copy_is_a_model_of_its_own():
    model = Small()
    run = compiled(model, "1MB")
    run(X)
    twin = copy.deepcopy(run)
    assert not {id(p) for p in twin.parameters()} & {id(p) for p in run.parameters()}
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin.eval()(X).any()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert run.training


def test_pickle_keeps_the_budget_and_the_weights():
    run = compiled(Small(), "1MB").eval()
    with torch.no_grad():
        expected = run(X)
        again = pickle.loads(pickle.dumps(run))
        torch.testing.assert_close(again(X), expected, rtol=0, atol=0)
    assert not again.training
    assert again.report.budget_bytes == 1_000_000


def test_another_dtype_is_planned_anew():
    model = Small()
    run = compiled(model, "1MB")
    run(X)
    before = run.report.peak_bytes
    assert run.to(torch.float64) is run
    assert model.first.weight.dtype == torch.float64
    found = run(X.double())
    assert found.dtype == torch.float64
    assert run.report.peak_bytes > 1.5 * before


def test_freezing_and_unfreezing_is_followed():
    model = Small().eval()
    run = compiled(model)
    for trainable in (True, False, True):
        model.first.requires_grad_(trainable)
        _, expected = gradients_of(model, model, X)
        _, found = gradients_of(run, model, X)
        assert [g is None for g in found] == [g is None for g in expected]
        for a, b in zip(found, expected, strict=True):
            assert a is b is None or torch.equal(a, b)


@pytest.mark.long
def test_accumulated_gradients_equal_eager_s_and_stay_inside():
    model, inputs = build("resnet18")
    model.eval()  # its running statistics stand still, so that one model serves both runs
    report = memopt.plan(model.train(), inputs)
    model.eval()
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = report.unconstrained_bytes + gradients
    run = compiled(model, budget)
    for _ in range(2):
        step(model, inputs)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        step(run, inputs)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)
    resident = gradients * 2 + sum(t.numel() * t.element_size() for t in (*model.buffers(), *inputs.values()))
    measured = resident + memopt.measure(step, run, inputs).peak_bytes
    assert measured <= budget
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("budget", [None, "tight"])
def test_backward_twice_with_retain_graph(budget):
    model = Small(width=64)
    x = torch.randn(32, 8)
    if budget == "tight":
        budget = int(memopt.plan(model, (x,)).minimum_bytes * 1.02)
    found = []
    for run in (model, compiled(model, budget)):
        model.zero_grad()
        torch.manual_seed(1)
        loss = run(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad.clone() for p in model.parameters()])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
