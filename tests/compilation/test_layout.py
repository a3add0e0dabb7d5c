"""Weights laid out anew: which may be, and that nothing but their strides changes."""

import torch
from torch import nn

from memopt.compilation import layout
from memopt.compilation.layout import convolution_weights, lay_out, movable_parameters
from tests.support import capture


def test_what_another_tensor_shares_is_not_moved():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    view = model[2].bias.data[:2]
    assert movable_parameters(model) == {"0.bias", "1.bias", "2.weight"}
    assert len(view) == 2


def test_a_parameter_laid_out_channels_last_is_the_same_object_in_its_memory():
    model = nn.Conv2d(3, 5, 3)
    weight, values, place = model.weight, model.weight.detach().clone(), model.weight.data_ptr()
    lay_out(model, ["weight"])
    assert model.weight is weight and weight.data_ptr() == place
    assert weight.is_contiguous(memory_format=torch.channels_last) and torch.equal(weight, values)


def test_parameters_of_a_group_lie_side_by_side():
    model = nn.ModuleDict({name: nn.Linear(4, 6, bias=False) for name in ("query", "key", "value")})
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    lay_out(model, [], [list(values)])
    query, key, value = (model[name].weight for name in ("query", "key", "value"))
    assert key.data_ptr() - query.data_ptr() == value.data_ptr() - key.data_ptr() == query.nbytes
    assert all(torch.equal(parameter, values[name]) for name, parameter in model.named_parameters())


def test_weights_of_convolutions_alone_are_asked_for():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)).eval()
    program = capture(model, torch.randn(2, 3, 8, 8))
    names = [name for name, _ in model.named_parameters()]
    assert convolution_weights(program, names) == ["0.weight"], "of one row and column all layouts are one"
    assert convolution_weights(program, []) == []


def test_a_graph_is_asked_once_how_its_weights_should_lie(monkeypatch):
    asked = []
    monkeypatch.setattr(
        layout, "with_layout", lambda program, movable, contiguous: asked.append((set(movable), contiguous))
    )
    weights = layout.WeightLayout(["w"])
    for key in ("a", "a", "b"):
        weights.laid_out("program", key)
    weights.changes(layout.LayoutNeeded(["w"], [], [True]))
    weights.laid_out("program", "c")
    assert asked == [({"w"}, ()), (set(), ()), ({"w"}, ()), (set(), (True,))]
