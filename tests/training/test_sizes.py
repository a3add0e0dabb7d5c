"""Inputs of many sizes: the plan of the largest serves the smaller ones, inside the budget, with eager's gradients."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import nn

import memopt
from memopt.solve import solver_worker
from memopt.step import plan_transfer
from tests.training.steps import assert_equal, bytes_of, gradients, make, peak_of


@pytest.fixture
def searches(monkeypatch):
    """One entry per search that was made: how many operations it was about."""
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    made = []
    search = solver_worker.curve

    def counted(problem, *, seconds):
        made.append(seconds)
        return search(problem, seconds=seconds)

    monkeypatch.setattr(solver_worker, "curve", counted)
    return made


def budget_between(model, inputs, share):
    """A budget for the largest inputs: the least at 0, what a step takes without a plan at 1."""
    torch._dynamo.reset()
    report = memopt.plan(model, inputs)
    torch._dynamo.reset()
    low = int(report.minimum_bytes * 1.02)
    return int(low + share * (report.unconstrained_bytes - low))


def tiny(name, **options):
    torch.manual_seed(0)
    model = memopt.models.build(name, tiny=True, **options)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.momentum = 0.0  # running statistics stay: eager and planned steps see the same model
    return model


def trained(run, inputs):
    torch.manual_seed(1)
    out = run(**inputs)
    loss = out if isinstance(out, torch.Tensor) else out.loss
    loss.backward()
    return loss.detach()


def check_sizes(model, budget, batches, searches):
    """Train on every batch, beside eager; return how many searches were made after the first batch."""
    run = memopt.compile(model, budget, backend="aten", example_inputs=batches[0])
    first = len(searches)
    assert first
    for inputs in batches:
        expected = trained(model, inputs), gradients(model)
        model.zero_grad()
        assert run._memopt.model is model
        found = trained(run, inputs), gradients(model)
        for new, old in zip(found[1], expected[1], strict=True):
            if old is not None:
                assert (new - old).norm() <= 1e-4 * max(old.norm(), 1e-3)
        assert_close(found[0], expected[0])
        model.zero_grad()
        assert run.report.peak_bytes <= budget
        assert peak_of(lambda inputs=inputs: trained(run, inputs), model, inputs) <= budget
        model.zero_grad()
    return len(searches) - first


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_gpt_at_random_batches_and_lengths_is_searched_for_once(searches):
    model = tiny("gpt2", layers=1)
    draw = random.Random(0)
    sizes = [(4, 16), *((draw.randint(1, 4), draw.randint(2, 16)) for _ in range(3))]
    batches = [model.example_inputs(batch, labels=True, sequence=length) for batch, length in sizes]
    assert check_sizes(model, budget_between(model, batches[0], 0.5), batches, searches) == 0


@pytest.mark.long
def test_a_resnet_at_random_batches_and_resolutions_is_searched_for_once(searches):
    model = tiny("resnet18")
    draw = random.Random(1)
    sizes = [(4, 96), (2, 64), (draw.randint(2, 4), draw.choice((64, 80, 96)))]
    batches = [model.example_inputs(batch, labels=True, resolution=side) for batch, side in sizes]
    assert check_sizes(model, budget_between(model, batches[0], 0.5), batches, searches) == 0


@pytest.mark.long
def test_a_larger_step_is_searched_for_and_then_serves(searches):
    model, x = make()
    budget = budget_between(model, (x,), 0.5)
    run = memopt.compile(model, budget, backend="aten", example_inputs=(x[:64],))
    counts = []
    for rows in (64, 128, 256, 192, 100, 256, 17):
        run(x[:rows]).backward()
        model.zero_grad()
        counts.append(len(searches))
        assert run.report.peak_bytes <= budget
    assert counts[0] < counts[1] < counts[2] == counts[-1]


@pytest.mark.long
def test_a_smaller_step_recomputes_no_more_than_it_must(searches):
    model, x = make()
    run = memopt.compile(model, budget_between(model, (x,), 0.3), backend="aten", example_inputs=(x,))
    assert any(program.recomputed for program in run.report.programs)
    run(x[:32]).backward()
    assert not any(program.recomputed for program in run.report.programs)


def test_accumulation_is_planned_without_another_search(searches):
    model, x = make()
    budget = budget_between(model, (x,), 0.6) + bytes_of(list(model.parameters()))
    run = memopt.compile(model, budget, backend="aten")
    run(x).backward()
    made = len(searches)
    run(x).backward()
    assert len(run._memopt.sessions) == 2 and len(searches) == made
    assert run.report.peak_bytes <= budget


@pytest.mark.long
def test_a_storm_of_searches_is_impossible_and_advice_is_given_once(searches, monkeypatch, caplog):
    monkeypatch.setattr(plan_transfer, "SEARCHES", 2)
    model, x = make(layers=2)
    budget = budget_between(model, (x,), 0.6)
    run = memopt.compile(model, budget, backend="aten")
    counts = []
    searches.clear()
    with caplog.at_level(logging.WARNING, "memopt"):
        for rows in range(40, 257, 54):  # each larger than the last
            expected = [run._memopt.model(x[:rows]).detach()]
            run._memopt.model.zero_grad()
            found = run(x[:rows])
            found.backward()
            assert_equal([found.detach()], expected)
            model.zero_grad()
            counts.append(len(searches))
            assert run.report.peak_bytes <= budget
            assert peak_of(lambda rows=rows: run(x[:rows]).backward(), model, x[:rows]) <= budget
            model.zero_grad()
    assert counts == [1, 2, 2, 2, 2]
    advice = [record for record in caplog.records if "example_inputs" in record.getMessage()]
    assert len(advice) == 1 and "\n" not in advice[0].getMessage()


class Broken(nn.Module):
    """Two graphs in one step."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU())] * 3)
        self.second = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.GELU())] * 3)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.long
def test_several_graphs_share_the_budget_at_every_size(searches):
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(512, 16)
    budget = budget_between(model, (x,), 0.4)
    run = memopt.compile(model, budget, backend="aten")
    made = []
    for rows in (512, 256, 384, 40):
        expected = trained(model, {"x": x[:rows]}), gradients(model)
        model.zero_grad()
        assert_equal((trained(run, {"x": x[:rows]}), gradients(model)), expected)
        model.zero_grad()
        assert len(run.report.programs) == 2
        assert peak_of(lambda rows=rows: run(x[:rows]).backward(), model, x[:rows]) <= budget
        model.zero_grad()
        made.append(len(searches))
    assert made[0] == made[-1] > 0


@pytest.mark.long
def test_a_step_of_another_form_is_searched_for(searches):
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = make(layers=2)[0]

        def forward(self, x):
            return self.layers(x if x.shape[0] % 2 else x.sin())

    model, x = Either(), make()[1]
    run = memopt.compile(model, "1GB", backend="aten")
    counts = []
    for rows in (256, 128, 255, 127):
        run(x[:rows]).backward()
        model.zero_grad()
        counts.append(len(searches))
    assert counts[0] == counts[1] < counts[2] == counts[3]
