"""Micro-batches: gradients that exist already count, and what happens in between changes neither numbers nor peak."""

from __future__ import annotations

import pytest
import torch

import memopt
from tests.training.steps import assert_equal, budget_for, bytes_of, gradients, make, peak_of

MICRO = 3


def parts(x, count=MICRO):
    return [x.roll(number, 0) * (1 + number / 8) for number in range(count)]


def accumulate(run, batches):
    """The losses of the micro-batches; gradients add up."""
    losses = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        loss = run(batch) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return losses


def accumulating_budget(model, x, share):
    """A budget for a step that finds gradients: they come on top of the plan's own."""
    return budget_for(model, (x,), share, more=bytes_of(list(model.parameters())))


@pytest.mark.quick("0.5")
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_every_micro_batch_stays_inside(share):
    model, x = make(dropout=0.2)
    budget = accumulating_budget(model, x, share)
    batches = parts(x)
    expected = accumulate(model, batches), gradients(model)
    model.zero_grad()
    run = memopt.compile(model, budget, backend="aten")
    assert_equal((accumulate(run, batches), gradients(model)), expected)
    model.zero_grad()
    for number, batch in enumerate(batches):
        measured = peak_of(lambda batch=batch: accumulate(run, [batch]), model, batch)
        assert measured <= budget
        assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)
        if number:  # at a peak in forward the gradients that exist are all there are
            assert run.report.breakdown.gradients >= bytes_of(list(model.parameters()))


def test_gradients_of_zeros_are_gradients():
    model, x = make()
    budget = accumulating_budget(model, x, 0.2)
    run = memopt.compile(model, budget, backend="aten")
    run(x).backward()
    expected = gradients(model)
    for _ in range(2):  # the first time plans
        model.zero_grad(set_to_none=False)
        run(x).backward()
        assert_equal(gradients(model), expected)
    model.zero_grad(set_to_none=False)
    assert peak_of(lambda: run(x).backward(), model, x) <= budget
    assert run.report.breakdown.gradients >= bytes_of(list(model.parameters()))


def test_a_budget_without_room_for_two_sets_of_gradients_is_refused_at_the_second_micro_batch():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    x = torch.randn(4, 64)
    weights = bytes_of(list(model.parameters()))
    budget = int(2.5 * weights)
    run = memopt.compile(model, budget, backend="aten")
    run(x).sum().backward()
    before = gradients(model)
    with pytest.raises(memopt.BudgetError) as caught:
        run(x)
    assert caught.value.minimum_bytes > 3 * weights
    assert_equal(gradients(model), before)
    model.zero_grad()
    assert peak_of(lambda: run(x).sum().backward(), model, x) <= budget


@pytest.mark.long
def test_evaluation_in_between_changes_nothing():
    model, x = make(dropout=0.2)
    batches = parts(x)

    def interrupted(run, evaluate):
        losses, seen = [], []
        for number, batch in enumerate(batches):
            losses += accumulate(run, [batch])
            if evaluate:
                with torch.no_grad():
                    seen.append(run(batch))  # in training mode: dropout draws, nothing is saved
                model.eval()
                with torch.no_grad():
                    seen.append(run(batch[: 64 + number]))
                with torch.inference_mode():
                    seen.append(run(batch))
                model.train()
        return losses, seen

    budget = accumulating_budget(model, x, 0.2)
    expected = interrupted(model, True), gradients(model)
    model.zero_grad()
    run = memopt.compile(model, budget, backend="aten")
    assert_equal((interrupted(run, True), gradients(model)), expected)
    assert all(not value.requires_grad for value in expected[0][1])
    model.zero_grad()
    assert_equal((interrupted(run, False)[0], gradients(model)), (expected[0][0], expected[1]))
    model.zero_grad()
    assert peak_of(lambda: interrupted(run, True), model, batches) <= budget + bytes_of(batches[1:])


@pytest.mark.long
def test_the_budget_of_evaluation_is_that_of_inference():
    model, x = make()
    budget = budget_for(model, (x,), 0.1)
    run = memopt.compile(model, budget, backend="aten")
    run(x).backward()
    model.zero_grad()
    with torch.no_grad():
        assert_equal(run(x), model(x))
        measured = peak_of(lambda: run(x), model, x)
    assert run.report.programs[0].kind == "inference"
    assert measured <= run.report.peak_bytes <= budget


@pytest.mark.long
def test_optimizer_steps_in_between_many_micro_batches():
    batches = parts(make()[1], 2)

    def loop(run, model, optimizer):
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses += accumulate(run, batches)
            optimizer.step()
        return losses

    def whole(budget=None):
        model, _ = make(dropout=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
        run = model if budget is None else memopt.compile(model, budget, optimizer=optimizer, backend="aten")
        result = loop(run, model, optimizer), [p.detach().clone() for p in model.parameters()]
        if budget is not None:
            optimizer.zero_grad()
            measured = peak_of(lambda: loop(run, model, optimizer), model, optimizer, batches)
            assert measured <= budget + batches[1].nbytes
        return result

    model, x = make(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)
    more = bytes_of(list(model.parameters()))
    assert_equal(whole(budget_for(model, (x,), 0.2, more=more, optimizer=optimizer)), whole())
