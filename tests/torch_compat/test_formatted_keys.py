"""A key that is formatted of a tensor finds what it finds in eager, whatever the tensor's value is then."""

import pytest
import torch
from torch import nn
from torch._dynamo.variables.misc import StringFormatVariable

import memopt
from memopt.torch_compat.formatted_keys import formatted_keys

_SCALES = {"part0": 1.0, "part1": 2.0}

LOOKS = {
    "get": lambda key: _SCALES.get(key, 7.0),
    "in": lambda key: 3.0 if key in _SCALES else 7.0,
    "set": lambda key: 3.0 if key in {"part0", "part1"} else 7.0,
    "written": lambda key: {"part0": 1.0, key: 5.0}["part0"],
}


class Chooses(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.linear, self.look = nn.Linear(4, 4), look

    def forward(self, x, index):
        return self.linear(x) * LOOKS[self.look](f"part{index}")


@pytest.mark.quick("get")
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_found_is_what_eager_finds(look):
    torch._dynamo.reset()
    model = Chooses(look)
    compiled = memopt.compile(model, backend="aten")
    x = torch.randn(2, 4)
    for index in (1, 0, 2):
        torch.testing.assert_close(compiled(x, torch.tensor(index)), model(x, torch.tensor(index)))


class Experts(nn.ModuleDict):
    """As the experts of SwitchTransformers: by the names that their numbers make."""

    def __init__(self):
        super().__init__({f"expert_{i}": nn.Linear(8, 8) for i in range(2)})

    def forward(self, x):
        out, chosen = torch.zeros_like(x), (x[:, 0] > 0).long()
        for index in torch.bincount(chosen, minlength=2).gt(0).nonzero():
            rows = torch.where(chosen == index)[0]
            out.index_add_(0, rows, self[f"expert_{index[0]}"](x[rows]))
        return out


def test_experts_by_name_train_within_a_budget():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), Experts())
    compiled = memopt.compile(model, "1MB", backend="aten")
    x, found = torch.randn(8, 8), []
    for call in (model, compiled):
        model.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.skipif(not hasattr(StringFormatVariable, "hash_impl"), reason="torch 2.11 ends the graph there itself")
def test_elsewhere_tracing_is_as_ever():
    def scaled(x, index):
        return x * LOOKS["get"](f"part{index}")

    x, index = torch.ones(2), torch.tensor(1)
    torch._dynamo.reset()
    with formatted_keys(), pytest.raises(torch._dynamo.exc.Unsupported, match="formatted of a tensor"):
        torch.compile(scaled, backend="eager", fullgraph=True)(x, index)
    torch._dynamo.reset()
    torch.compile(scaled, backend="eager", fullgraph=True)(x, index)
