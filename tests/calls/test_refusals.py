"""Budgets that no plan keeps: refused before anything is traced, and remembered until something is different."""

import pickle

import pytest
import torch
from torch import nn

import memopt
import memopt.calls.tracing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Net(nn.Module):
    """Takes much for its activations, and less where a switch is set."""

    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.GELU())))
        self.frugal = False

    def forward(self, x):
        return self.layers[:2](x).sum() if self.frugal else self.layers(x).exp().sum()


def made(rows=256):
    torch.manual_seed(0)
    model = Net()
    return model, torch.randn(rows, 64), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


@pytest.fixture
def _large(monkeypatch):
    monkeypatch.setattr("memopt.calls.refusals._LARGE_MODULES", 2)


@pytest.fixture
def traced(monkeypatch):
    """The graphs that were handed over by Dynamo."""
    seen = []
    hooks = memopt.calls.tracing.Hooks
    monkeypatch.setattr("memopt.calls.tracing.Hooks", lambda *args: seen.append(1) or hooks(*args))
    return seen


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("ahead", [False, True])
def test_what_gradients_alone_exceed_is_refused_before_optimizers_are_counted(ahead, traced, monkeypatch):
    """A copy of one is stepped for that, which takes a second for some hundred parameters."""
    model, x, optimizer = made()
    weights, counted = sum(p.nbytes for p in model.parameters()), []
    monkeypatch.setattr("memopt.memory.optimizers.optimizer_footprint", lambda *given: counted.append(given))
    given = x if ahead else None
    least = 2 * weights + x.nbytes
    with pytest.raises(memopt.BudgetError, match=r"at least .* gradients") as caught:
        memopt.compile(model, least - 4096, optimizer=optimizer, backend="aten", example_inputs=given)(x)
    assert not counted and not traced
    assert least <= caught.value.minimum_bytes <= least + 4096 and caught.value.breakdown.gradients == weights


@pytest.mark.usefixtures("_large")
def test_what_state_exceeds_as_well_is_refused_before_optimizers_are_counted(traced, monkeypatch):
    """Of a parameter of each kind it is known what state takes at least."""
    model, x, _ = made()
    optimizer, counted = torch.optim.AdamW(model.parameters()), []
    weights = sum(p.nbytes for p in model.parameters())
    monkeypatch.setattr("memopt.step.optimizers.count", lambda *given: counted.append(given))
    run = memopt.compile(model, 3 * weights + x.nbytes, optimizer=optimizer, backend="aten")
    for _ in range(2):
        with pytest.raises(memopt.BudgetError, match=r"at least .* optimizer state") as caught:
            run(x)
        assert 4 * weights + x.nbytes <= caught.value.minimum_bytes <= 4 * weights + x.nbytes + 4096
    assert not counted and not traced and not optimizer.state


@pytest.mark.whole_process
def test_a_refusal_is_remembered_beside_other_tensors_of_the_process(traced):
    others = [torch.zeros(1 << 18)]
    model, x, optimizer = made()
    run = memopt.compile(model, others[0].nbytes + 100_000, optimizer=optimizer, backend="aten")
    first = refusal(run, x)
    assert traced and "other tensors of the process" in first
    del traced[:]
    assert refusal(run, x) == first and not traced


def refusal(run, x):
    """What a call is refused with; its traceback, which holds tensors, is gone."""
    try:
        run(x)
    except memopt.BudgetError as error:
        return str(error)
    raise AssertionError("not refused")


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("ahead", [False, True])
def test_a_hopeless_budget_is_refused_before_anything_is_traced(ahead, traced):
    model, x, optimizer = made()
    weights = sum(p.nbytes for p in model.parameters())
    least = 3 * weights + x.nbytes  # with gradients and momentum
    with pytest.raises(memopt.BudgetError, match="at least") as caught:
        run = memopt.compile(
            model, least - 4096, optimizer=optimizer, backend="aten", example_inputs=x if ahead else None
        )
        run(x)
    assert not traced and "\n" not in str(caught.value)
    assert least <= caught.value.minimum_bytes <= least * 1.1  # with what the optimizer takes for a moment
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.at_least
    with pytest.raises(memopt.BudgetError) as planned:  # what it is in truth
        memopt.plan(model, (x,), least, optimizer=optimizer)
    assert planned.value.minimum_bytes >= caught.value.minimum_bytes and not planned.value.at_least


@pytest.mark.usefixtures("_large")
def test_inference_needs_neither_gradients_nor_an_optimizer(traced):
    model, x, _ = made()
    weights = sum(p.nbytes for p in model.parameters())
    run = memopt.compile(model.eval(), weights + x.nbytes - 4096, backend="aten")
    with torch.no_grad(), pytest.raises(memopt.BudgetError, match="at least"):
        run(x)
    assert not traced


def test_a_small_model_s_refusal_names_a_minimum_that_works():
    model, x, optimizer = made()
    with pytest.raises(memopt.BudgetError) as caught:
        memopt.compile(model, 1000, optimizer=optimizer, backend="aten")(x)
    assert not caught.value.at_least
    memopt.compile(model, caught.value.minimum_bytes, optimizer=optimizer, backend="aten")(x).backward()


CHANGES = {
    "inputs": lambda run, x: x[:16],
    "attribute": lambda run, x: setattr(run, "frugal", True) or x,
    "entry": lambda run, x: run.layers.__setitem__(1, nn.Tanh()) or x,
    "frozen": lambda run, x: run.layers[0].requires_grad_(False) and x,
    "mode": lambda run, x: run.eval() and x,
    "dtype": lambda run, x: run.bfloat16() and x.bfloat16(),
    "optimizer": lambda run, x: run.set_optimizer(torch.optim.SGD(run.parameters(), lr=0.1)) or x,
}


@pytest.mark.quick("dtype", "inputs", "optimizer")
@pytest.mark.parametrize("change", CHANGES)
def test_a_refusal_is_remembered_until_something_is_different(change, traced):
    model, x, optimizer = made()
    least = 3 * sum(p.nbytes for p in model.parameters()) + x.nbytes
    run = memopt.compile(model, int(1.1 * least), optimizer=optimizer, backend="aten")
    with pytest.raises(memopt.BudgetError) as first:
        run(x)
    assert traced and not first.value.at_least
    del traced[:]
    for _ in range(2):
        with pytest.raises(memopt.BudgetError) as again:
            run(x)
        assert str(again.value) == str(first.value) and again.value is not first.value
    assert not traced
    try:
        run(CHANGES[change](run, x))
    except memopt.BudgetError as error:
        assert change != "inputs" and not error.at_least
    assert traced


def test_after_a_refusal_the_report_is_that_of_steps_that_run():
    torch.manual_seed(0)
    run = memopt.compile(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), "300kB", backend="aten")
    for rows in (64, 128, 4096, 128):
        if rows == 4096:
            with pytest.raises(memopt.BudgetError):
                run(torch.ones(rows, 8))
        else:
            run(torch.ones(rows, 8)).square().mean().backward()
        assert run.report.measured_peak_bytes is not None
        assert max(run.report.peak_bytes, run.report.measured_peak_bytes) <= 300_000
