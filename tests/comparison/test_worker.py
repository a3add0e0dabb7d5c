"""The process of one row: steps, and what is told of them."""

import dataclasses

import pytest
import torch
from torch import nn

import memopt
from memopt.comparison import worker
from memopt.comparison.job import Job


@pytest.fixture
def job():
    """Of a training step on a CPU; what is not asked for here is as it comes."""
    wanted = {"training": True, "device": "cpu", "dtype": "", "warmup": 1, "repeats": 2, "optimizer": ""}
    names = [field.name for field in dataclasses.fields(Job)]
    return Job(**{name: wanted.get(name) for name in names})


def test_a_step_trains_from_gradients_that_are_none(job):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.detach().clone()
    worker.stepper(job, model, model, (torch.ones(3, 4),), optimizer)()
    gradient = model.weight.grad.clone()
    torch.testing.assert_close(model.weight.detach(), before - 0.5 * gradient)
    worker.stepper(job, model, model, (torch.ones(3, 4),))()
    assert model.weight.grad.abs().max() <= 2 * gradient.abs().max(), "it was not added to the first"


def test_without_training_nothing_has_gradients(job):
    seen = []
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    worker.stepper(dataclasses.replace(job, training=False), model, model, (torch.ones(3, 4),))()
    assert seen == [False] and model.weight.grad is None


def test_steps_are_timed_behind_those_that_warm_up(job):
    taken = []
    found = worker.timed(job, True, lambda: taken.append(torch.ones(1000)), nn.Linear(4, 2))
    assert len(found["seconds"]) == 2 and len(taken) == 4, "one warms up, one is measured"
    assert found["allocated_bytes"] >= 4000
    assert "allocated_bytes" not in worker.timed(job, False, lambda: None, nn.Linear(4, 2))


def test_only_memopt_has_a_report():
    model = nn.Linear(4, 2)
    assert worker.report_of(model) is None
    run = memopt.compile(model, backend="aten", example_inputs=(torch.ones(3, 4),))
    assert worker.report_of(run) is run.report


def test_a_model_is_placed_in_the_dtype_of_the_job(job):
    model, (x,) = worker.place(dataclasses.replace(job, dtype="float64"), nn.Linear(4, 2), (torch.ones(3, 4),))
    assert model.weight.dtype == x.dtype == torch.float64
