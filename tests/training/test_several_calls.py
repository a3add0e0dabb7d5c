"""Several calls of a model before the first backward: what the earlier ones hold is counted, and the room is shared."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import memopt


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


# Scalars of the loss, which is computed outside of the model.
_LOSS = 256


def _net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 4))


def _siamese(call, inputs):
    first, *others = [call(x).mean() for x in inputs]
    sum((other - first).square() for other in others).backward()


def _peak(call, model, inputs, step=_siamese):
    model.zero_grad()
    gc.collect()
    held = sum(p.nbytes for p in model.parameters()) + sum(x.nbytes for x in inputs)
    return memopt.measure(lambda: step(call, inputs)).peak_bytes + held


def _steps(call, model, inputs, count, step=_siamese):
    """Steps as in a loop; those that were refused."""
    refused = []
    for _ in range(count):
        try:
            step(call, inputs)
        except memopt.BudgetError as error:
            refused.append(error)
        model.zero_grad()
    return refused


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_kept_or_refused_by_name_and_kept_from_the_next_step_on(calls, share):
    inputs = [torch.randn(256, 64) for _ in range(calls)]
    model, reference = _net(), _net()
    _siamese(reference, inputs)
    reference.zero_grad()
    budget = int(share * _peak(reference, reference, inputs))
    compiled = memopt.compile(model, budget, backend="aten")
    refused = _steps(compiled, model, inputs, 2)
    assert len(refused) < 2
    for error in refused:
        assert "earlier call" in str(error) and "B" in error.beside
    assert _peak(compiled, model, inputs) <= budget + _LOSS
    assert compiled.report.peak_bytes <= budget
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_other_shapes_in_one_step():
    inputs = [torch.randn(256, 64), torch.randn(128, 64)]
    model = _net()

    def step(call, inputs):
        (call(inputs[0]).mean() - call(inputs[1]).mean()).square().backward()

    step(model, inputs)
    budget = int(0.7 * _peak(model, model, inputs, step))
    model.zero_grad()
    compiled = memopt.compile(model, budget, backend="aten")
    assert len(_steps(compiled, model, inputs, 2, step)) < 2
    assert _peak(compiled, model, inputs, step) <= budget + _LOSS


def test_a_fraction_is_of_the_whole_step():
    inputs = [torch.randn(256, 64) for _ in range(2)]
    model = _net()
    _siamese(model, inputs)
    eager = _peak(model, model, inputs)
    model.zero_grad()
    compiled = memopt.compile(model, 0.75, backend="aten")
    _steps(compiled, model, inputs, 2)
    assert _peak(compiled, model, inputs) <= 0.75 * eager + _LOSS
    # The caller drops the outputs, which are counted.
    assert 0.7 * eager < compiled.report.budget_bytes <= 0.76 * eager


def test_inference_between_two_calls_counts_what_the_first_holds():
    x, model = torch.randn(256, 64), _net()

    def step(call, inputs):
        first = call(x).mean()
        with torch.no_grad():
            target = call(torch.randn(1024, 64)).mean()
        (first - target + call(x).mean()).square().backward()

    step(model, [])
    budget = int(0.75 * _peak(model, model, [x], step))
    model.zero_grad()
    compiled = memopt.compile(model, budget, backend="aten")
    _steps(compiled, model, [], 3, step)
    try:
        taken = _peak(compiled, model, [x], step)
    except memopt.BudgetError as error:
        assert "earlier call" in str(error)
    else:
        assert taken <= budget + _LOSS


def test_calls_whose_backward_ran_or_never_will_hold_nothing():
    x, model = torch.randn(256, 64), _net()
    model(x).mean().backward()
    budget = int(0.6 * _peak(model, model, [x], lambda call, inputs: call(x).mean().backward()))
    model.zero_grad()
    compiled = memopt.compile(model, budget, backend="aten")
    for _ in range(3):
        compiled(x)  # dropped at once
        compiled(x).mean().backward()
        model.zero_grad()
    assert compiled._memopt.earlier.most == 1 and not compiled._memopt.earlier.alive()


def test_a_graph_that_is_retained_still_holds():
    x, model = torch.randn(64, 64), _net()
    compiled = memopt.compile(model, "100MB", backend="aten")
    loss = compiled(x).mean()
    loss.backward(retain_graph=True)
    assert len(compiled._memopt.earlier.alive()) == 1
    loss.backward()
    assert not compiled._memopt.earlier.alive()


def test_a_cell_that_runs_many_times_is_compiled_once():
    torch.manual_seed(0)
    cell, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(8, 16)
    compiled = memopt.compile(cell, "1MB", backend="aten")

    def step():
        h = x
        for _ in range(12):
            h = compiled(h)
        h.sum().backward()

    for _ in range(3):
        step()
        cell.zero_grad()
    assert len(compiled._memopt.sessions) <= 3 and compiled.report.peak_bytes <= 1_000_000
