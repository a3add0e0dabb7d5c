"""Micro-batches: gradients that exist already count, and what happens in between changes neither numbers nor peak."""

from __future__ import annotations

import types

import pytest
import torch

import memopt
from memopt.cuda_graphs.pool import GraphPool
from memopt.step.hooked import WAIT
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


def stack():
    """Weights that dominate activations."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))), torch.randn(4, 64)


def tied():
    torch.manual_seed(0)
    first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64, bias=False)
    last.weight = first.weight
    return torch.nn.Sequential(first, torch.nn.GELU(), torch.nn.Linear(64, 64), last), torch.randn(4, 64)


def convolutions():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU()]
    layers += [torch.nn.Conv2d(32, 32, 3, padding=1), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers), torch.randn(2, 32, 4, 4)


class Lookups(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 32)

    def forward(self, input_ids, labels):
        return types.SimpleNamespace(loss=self.last(self.table(input_ids)).relu().square().sum())


def lookups():
    torch.manual_seed(0)
    return Lookups(), torch.randint(0, 64, (1, 8))


def gpt2():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256, "n_positions": 16}
    others = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **others, use_cache=False))
    return model, torch.randint(0, 256, (1, 8))


def loss_of(run, x):
    return run(input_ids=x, labels=x).loss if x.dtype == torch.int64 else run(x).square().sum()


@pytest.mark.quick("stack-*", "tied-aten", "convolutions-aten", "lookups-aten")
@pytest.mark.parametrize("backend", ["aten", "inductor"])
@pytest.mark.parametrize("make", [stack, tied, convolutions, lookups, gpt2])
def test_gradients_are_added_to_those_that_exist_as_they_come(make, backend):
    model, x = make()

    def micro_batch(run):
        torch.manual_seed(0)
        loss_of(run, x).backward()

    def three(run):
        model.load_state_dict(state)
        model.zero_grad()
        for _ in range(3):
            micro_batch(run)
        return gradients(model)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = three(model)
    eager = peak_of(lambda: micro_batch(model), model, x)
    run = memopt.compile(model, eager, backend=backend)
    found = three(run)
    measured = peak_of(lambda: micro_batch(run), model, x)
    assert measured <= eager
    assert run.report.peak_bytes == pytest.approx(measured, rel=0.02)
    if backend == "aten":
        assert_equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_gone_when_backward_runs_was_counted():
    model, x = stack()
    run = memopt.compile(model, int(2.5 * bytes_of(list(model.parameters()))), backend="aten")
    run(x).sum().backward()
    expected = gradients(model)

    def set_to_none_between(run):
        out = run(x)
        model.zero_grad()
        out.sum().backward()

    set_to_none_between(run)
    assert_equal(gradients(model), expected)
    assert peak_of(lambda: set_to_none_between(run)) <= peak_of(lambda: set_to_none_between(model))


def test_gradients_asked_for_by_name_are_not_added():
    model, x = stack()
    run = memopt.compile(model, int(2.5 * bytes_of(list(model.parameters()))), backend="aten")
    run(x).sum().backward()
    before = gradients(model)
    found = torch.autograd.grad(run(x).sum(), list(model.parameters()))
    assert_equal(list(found), before)
    assert_equal(gradients(model), before)


class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.twice, _ = stack()

    def forward(self, x):
        x = self.twice(x)
        torch._dynamo.graph_break()
        return self.twice(x.relu())


def test_gradients_that_another_graph_adds_to_are_counted_to_the_end():
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(32, 64)
    run = memopt.compile(model, 5 * bytes_of(list(model.parameters())), backend="aten")
    for _ in range(2):
        run(x).square().sum().backward()
    measured = peak_of(lambda: run(x).square().sum().backward(), model, x)
    assert measured <= run.report.peak_bytes


def test_a_graph_that_is_kept_adds_its_gradients_each_time():
    model, x = stack()

    def twice(run):
        model.zero_grad()
        run(x).sum().backward()
        loss = run(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    expected = twice(model)
    assert_equal(twice(memopt.compile(model, int(2.7 * bytes_of(list(model.parameters()))), backend="aten")), expected)


@pytest.mark.parametrize("penalized", [False, True])
def test_gradients_that_wait_for_those_of_a_penalty_computed_before_the_call_are_counted_to_the_end(penalized):
    """Autograd adds both before it accumulates them, and runs the penalty's backward, the older, last."""
    model, x = stack()

    def step(run):
        penalty = sum(weight.square().sum() for weight in model.parameters()) if penalized else 0.0
        (run(x).sum() + 0.1 * penalty).backward()

    for _ in range(3):
        step(model)
    expected, held = gradients(model), bytes_of(list(model.parameters()))
    model.zero_grad()
    run = memopt.compile(model, 4 * held, backend="aten")
    for _ in range(3):
        step(run)
    assert_equal(gradients(model), expected)
    assert (WAIT in run.report.notes) == penalized
    assert len(run._memopt.last.early.added) == (0 if penalized else len(list(model.parameters())))
    assert (run.report.peak_bytes >= 3 * held) == penalized
    assert peak_of(lambda: step(run), model, x) <= 4 * held


def test_a_step_that_may_be_recorded_hands_over_what_the_budget_needs():
    model, x = stack()
    run = memopt.compile(model, 4 * bytes_of(list(model.parameters())), backend="aten")
    run(x).sum().backward()
    session = run._memopt.last
    (planned,) = session.step.planned
    assert session.may_lack(planned.program, False)
    session.exact, session.graph_pool = False, GraphPool(None, list)
    assert not session.may_lack(planned.program, False)
    assert not session.may_lack(planned.program, True)
    session.margin = session.budget.bytes
    assert session.may_lack(planned.program, False)
    session.graph_pool = None


def test_a_budget_without_room_for_a_gradient_beside_those_that_exist_is_refused_at_the_second_micro_batch():
    model, x = stack()
    weights = bytes_of(list(model.parameters()))
    budget = int(2.1 * weights)
    run = memopt.compile(model, budget, backend="aten")
    run(x).sum().backward()
    before = gradients(model)
    with pytest.raises(memopt.BudgetError) as caught:
        run(x)
    assert 2 * weights < caught.value.minimum_bytes < 3 * weights
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
