"""Where a model's tensors lie changes where it is moved or cast, and not where values change."""

import torch
from torch import nn

from memopt.memory.addresses import addresses


def test_values_may_change_and_places_stay():
    model = nn.BatchNorm1d(3)
    before = addresses(model)
    with torch.no_grad():
        model.weight.mul_(2)
    model(torch.randn(4, 3))
    assert addresses(model) == before and len(before) == 5


def test_a_cast_is_seen():
    model = nn.Linear(2, 2)
    before = addresses(model)
    model.double()
    assert addresses(model) != before


def test_another_layout_of_the_same_memory_is_seen():
    model = nn.Linear(3, 3, bias=False)
    before = addresses(model)
    model.weight.data = model.weight.data.t()
    assert addresses(model) != before


def test_a_sparse_tensor_has_no_address_and_is_itself():
    model = nn.Module()
    model.register_buffer("table", torch.eye(2).to_sparse())
    assert addresses(model) == addresses(model)
