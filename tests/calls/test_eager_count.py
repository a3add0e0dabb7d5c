"""What a call takes as it is, or why that is not known; and in which state a count holds."""

import types

import torch
from torch import nn

from memopt.calls.eager_count import eager_count, state_now
from memopt.calls.guard_fast_path import Kind
from memopt.memory.cost.table import CostTable
from memopt.memory.resident import Resident

SESSION = types.SimpleNamespace(table=CostTable(), resident=Resident())
TRAINS = Kind(True, False)


def count(model, *args, **kwargs):
    return eager_count(model, SESSION, TRAINS, args, kwargs)


def test_a_call_is_counted_and_leaves_the_model_as_it_was():
    model, x = nn.BatchNorm1d(64), torch.randn(32, 64)
    found = count(model, x)
    assert found.peaks.saved >= 32 * 64 * 4 and int(model.num_batches_tracked) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_why_a_count_is_not_known_is_said():
    assert count(nn.Linear(2, 2), object()) == "an argument is a object, which may hold tensors"
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        assert "hooks" in count(nn.Linear(2, 2), torch.ones(2, 2))


def test_a_count_holds_for_a_state_of_the_model_and_of_torchs_settings():
    model = nn.Linear(2, 2)
    before = state_now(model, SESSION)
    assert state_now(model, SESSION) == before
    with torch.autocast("cpu", torch.bfloat16):
        assert state_now(model, SESSION) != before
    model(torch.ones(1, 2)).sum().backward()
    assert state_now(model, SESSION) != before
