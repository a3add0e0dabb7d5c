"""The stages by which a fault is named: the program as captured, then with the passes."""

import dataclasses

import pytest
import torch

from memopt.api import make_options
from memopt.backends.aten import AtenBackend
from memopt.calls.model_calls import ModelCalls
from memopt.calls.stages import stages
from memopt.passes import INFERENCE


class Recorded:
    """Calls that note what they were made for."""

    def __init__(self, made, options):
        made.append(options)

    def run(self, args, kwargs):
        return args, kwargs


@pytest.fixture
def options():
    return make_options(budget="1GB", backend="aten", passes=INFERENCE, verify="full", device=torch.device("cpu"))


def test_each_stage_does_more_and_none_keeps_a_budget_or_is_verified(options):
    made = []
    found = stages(options, lambda given: Recorded(made, given))
    assert [name for name, _ in found] == ["captured program", "passes"]
    assert [given.passes for given in made] == [(), options.passes]
    assert all(given.budget is None and given.verify is False for given in made)
    assert all(isinstance(given.engine, AtenBackend) for given in made)
    assert found[0][1](1, x=2) == ((1,), {"x": 2})


def test_a_stage_runs_the_model(options):
    model, x = torch.nn.Linear(3, 2).eval(), torch.ones(1, 3)
    with torch.no_grad():
        for _, call in stages(dataclasses.replace(options, passes=None), lambda given: ModelCalls(model, given)):
            assert torch.equal(call(x), model(x))
