"""Reference models at 90, 80 … 30 % of their plain peak: kept with gradients as exact, or refused with the least."""

from __future__ import annotations

import pytest
import torch

import memopt
from tests import end_to_end as e2e
from tests.training.steps import assert_equal, gradients, peak_of

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
QUICK = "llama_tiny"


def check(name, shares):
    """How many of the falling shares were kept; the first that is refused ends the walk."""
    model, inputs = e2e.build(name)
    restore = e2e.restorer(model)
    expected, buffers = [e2e.step(model, inputs), *gradients(model)], [b.clone() for b in model.buffers()]
    restore()
    true = e2e.true_step(model, inputs)
    for kept, share in enumerate(shares):
        restore()
        torch._dynamo.reset()
        run = memopt.compile(model, share, backend="aten")
        try:
            found = [e2e.step(run, inputs), *gradients(model)]
        except memopt.BudgetError as error:
            assert error.minimum_bytes > error.budget_bytes
            assert all(p.grad is None for p in model.parameters())
            return kept
        e2e.assert_as_exact(found, expected, true, run.report)
        assert_equal(list(model.buffers()), buffers)
        model.zero_grad()
        measured = peak_of(lambda run=run: e2e.step(run, inputs), model, inputs)
        report = run.report
        assert measured <= report.budget_bytes == int(share * report.unconstrained_bytes)
        assert report.peak_bytes == pytest.approx(measured, rel=0.03)
    return len(shares)


def test_a_model_at_two_budgets():
    assert check(QUICK, (0.8, 0.6)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", e2e.FAMILIES)
def test_a_model_at_every_budget(name):
    assert check(name, SHARES) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", e2e.FAMILIES)
def test_a_refused_budget_s_minimum_is_true(name):
    model, inputs = e2e.build(name)
    with pytest.raises(memopt.BudgetError) as caught:
        e2e.step(memopt.compile(model, 0.05, backend="aten"), inputs)
    budget = int(caught.value.minimum_bytes * 1.02)
    torch._dynamo.reset()
    run = memopt.compile(model, budget, backend="aten")
    e2e.step(run, inputs)
    model.zero_grad()
    assert peak_of(lambda: e2e.step(run, inputs), model, inputs) <= budget
