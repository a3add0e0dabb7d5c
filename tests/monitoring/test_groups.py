"""What is alike in one line, and what belongs to weights."""

import torch
from torch import nn

from memopt.monitoring.groups import grouped, weights
from memopt.monitoring.lines import NOWHERE
from memopt.monitoring.tracker import Made, Origin
from memopt.torch_compat.storages import storage_id


def made(module, nbytes=8, shape=(2,)):
    return Made(Origin("forward", module, NOWHERE, torch.ops.aten.mm.default, shape, torch.float32), nbytes, 0, 1, ())


def test_modules_that_differ_in_numbers_are_one_group():
    big = made("head", 100)
    first, second = grouped([made("layers.0.mlp"), made("layers.1.mlp"), big])
    assert (first.module, first.bytes, first.count) == ("head", 100, 1)
    assert (second.module, second.bytes, second.count, second.operator) == ("layers.*.mlp", 16, 2, "aten.mm")
    assert [group.module for group in grouped([made("layers.0.mlp"), made("layers.0.mlp")])] == ["layers.0.mlp"]
    assert len(grouped([made("a"), made("a", shape=(1, 2))])) == 2


def test_weights_and_what_belongs_to_them():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    tied = nn.Sequential(model[0])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    found = weights([model, tied], [optimizer])
    weight = model[0].weight
    assert found[storage_id(weight)] == ("parameter", "0.weight")
    assert found[storage_id(weight.grad)] == ("gradient", "0.weight")
    assert found[storage_id(model[1].running_mean)] == ("buffer", "1.running_mean")
    assert found[storage_id(optimizer.state[weight]["exp_avg"])] == ("optimizer state", "0.weight")
