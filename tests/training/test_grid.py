"""Reference models at 90, 80 … 30 % of their plain peak: kept with gradients as exact, or refused with the least."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

import memopt
from memopt.memory.cost.key import key_of
from memopt.memory.cost.table import CostTable
from memopt.solve import recompute
from tests import end_to_end as e2e
from tests.training.steps import assert_equal, budget_for, gradients, make, peak_of

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
QUICK = "llama_tiny"


def check(name, shares):
    """The reports of the falling shares that were kept; the first that is refused ends the walk."""
    model, inputs = e2e.build(name)
    restore = e2e.restorer(model)
    expected, buffers = [e2e.step(model, inputs), *gradients(model)], [b.clone() for b in model.buffers()]
    restore()
    true = e2e.true_step(model, inputs)
    kept = []
    for share in shares:
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
        kept.append(report)
    return kept


def off(monkeypatch, seed):
    """Have times as of a clock that is off by up to 30 times either way, for each operator by a factor of its own."""
    look_up = CostTable._look_up

    def wrong(table, nodes, **options):
        found, scaled = look_up(table, nodes, **options), {}
        for node in (node for node in nodes if node.name in found):
            factor = math.exp(random.Random(f"{seed} {key_of(node)}").uniform(-3.4, 3.4))
            scaled[node.name] = dataclasses.replace(found[node.name], seconds=factor * found[node.name].seconds)
        return scaled

    monkeypatch.setattr(CostTable, "_look_up", wrong)
    monkeypatch.setattr(recompute, "EFFORT", 20_000)


@pytest.mark.long
def test_a_model_at_two_budgets():
    assert len(check(QUICK, (0.8, 0.6))) == 2


@pytest.mark.quick("1-False")
@pytest.mark.parametrize(("seed", "rounds"), [(0, True), (1, False)])
def test_whatever_the_clock_says_a_model_keeps_its_budget_and_its_numbers(monkeypatch, seed, rounds):
    """By the first costs a rewrite that rounds otherwise takes less than to recompute, by the second it does not."""
    off(monkeypatch, seed)
    (report,) = check(QUICK, (0.6,))
    assert any(record.name == "chunk_loss" and record.changes for record in report.passes) == rounds


@pytest.mark.long
def test_whatever_the_clock_says_a_small_step_keeps_its_budget_and_its_numbers(monkeypatch):
    model, x = make()
    budget = budget_for(model, x, 0.3)
    model(x).backward()
    expected, schedules = gradients(model), set()
    for seed in range(8):
        with monkeypatch.context() as patch:
            off(patch, seed)
            torch._dynamo.reset()
            model.zero_grad()
            run = memopt.compile(model, budget, backend="aten")
            assert peak_of(lambda run=run: run(x).backward(), model, x) <= budget
            assert_equal(gradients(model), expected)
            schedules.add(tuple(change for record in run.report.passes for change in record.changes))
    assert len(schedules) > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", e2e.FAMILIES)
def test_a_model_at_every_budget(name):
    assert check(name, SHARES)


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
