"""What a model's modules hold beside parameters, buffers and parts."""

import torch
from torch import nn

from memopt.memory.attributes import held_tensors, objects_of


class Settings:
    """A plain object with a tensor of its own."""

    def __init__(self):
        self.scale = torch.ones(3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.settings = self.part.settings = Settings()
        self.state = [torch.zeros(1), {"last": (torch.zeros(2), 7)}]
        self.same, self.kind, self.run = self.part.weight, Settings, torch.relu


def test_an_object_that_two_modules_hold_is_found_once():
    model = Model()
    assert [item for item in objects_of(model) if isinstance(item, Settings)] == [model.settings]


def test_tensors_of_containers_and_objects_are_found_and_parameters_are_not():
    model = Model()
    found = {id(tensor) for tensor in held_tensors(model)}
    assert found == {id(model.state[0]), id(model.state[1]["last"][0]), id(model.settings.scale)}


def test_modules_tensors_and_classes_are_no_objects():
    model = Model()
    assert not any(isinstance(item, (nn.Module, torch.Tensor, type)) for item in objects_of(model))
    assert list(held_tensors(nn.Linear(2, 2))) == []


def test_a_gradient_that_is_retained_belongs_to_its_tensor():
    model = nn.Linear(2, 2)
    model.kept = model(torch.ones(1, 2))
    model.plain = model.kept * 2
    model.kept.retain_grad()
    model.plain.sum().backward()
    found = {id(tensor) for tensor in held_tensors(model)}
    assert found == {id(model.kept), id(model.kept.grad), id(model.plain)}
