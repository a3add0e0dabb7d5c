"""Shadow: a twin of the model on fake tensors, with no data touched and everything else as it was."""

from __future__ import annotations

import collections
import functools
import types

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import memopt.in_place
from memopt.capture.shadow import Shadow, model_names
from memopt.module import calls_of
from memopt.program import InputKind


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.blocks[1].requires_grad_(False)
        self.again = self.blocks[0]
        self.register_parameter("nothing", None)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.scale, self.notes, self.table = 2.0, ["a"], torch.arange(3.0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        x = self.embedding(ids) * self.scale + self.mask + self.table
        for block in self.blocks:
            x = self.again(block(x))
        return self.head(x)


def test_the_twin_has_the_same_code_shapes_and_flags_but_no_data() -> None:
    model = Model().eval()
    shadow = Shadow(model)
    twin = shadow.model
    assert type(twin) is Model and twin is not model and not twin.training
    assert list(twin.state_dict()) == list(model.state_dict()) and twin.nothing is None
    for (name, fake), (other, real) in zip(twin.named_parameters(), model.named_parameters(), strict=True):
        assert name == other and isinstance(fake, nn.Parameter)
        assert isinstance(fake, FakeTensor) and fake.fake_mode is shadow.mode
        assert (fake.shape, fake.stride(), fake.dtype, fake.device, fake.requires_grad) == (
            *(real.shape, real.stride(), real.dtype, real.device, real.requires_grad),
        )
    assert isinstance(twin.steps, FakeTensor) and twin.steps.dtype is torch.int64
    assert "mask" not in twin.state_dict() and isinstance(twin.mask, FakeTensor)


def test_tied_weights_and_shared_modules_stay_shared() -> None:
    twin = Shadow(Model()).model
    assert twin.head.weight is twin.embedding.weight
    assert twin.again is twin.blocks[0] and twin.blocks[0].weight is not twin.blocks[1].weight


def test_a_model_that_contains_itself_has_such_a_twin() -> None:
    model = Model()
    model.blocks[0].owner = [model]  # hidden in a list, as models that know their parent do
    model.blocks[0].register_module("parent", model)
    twin = Shadow(model).model
    assert twin.blocks[0].parent is twin and twin.blocks[0].owner[0] is twin
    assert model.blocks[0].owner[0] is model


def test_plain_attributes_are_shared_and_assignments_stay_with_the_twin() -> None:
    model = Model()
    twin = Shadow(model).model
    assert twin.notes == model.notes and twin.table is model.table and twin.scale == 2.0
    twin.scale = 3.0
    twin.notes.append("b")
    twin.mask = None
    twin.head = nn.Identity()
    twin.train(False)
    assert model.scale == 2.0 and model.notes == ["a"] and model.mask is not None and isinstance(model.head, nn.Linear)
    assert model.training and all(module.training for module in model.modules())


def test_containers_are_the_twins_own_and_speak_of_its_parts() -> None:
    model = Model()
    model.seen, model.calls = [], collections.Counter()
    model.known = {"blocks": [model.head], model.head: {model.again}, "shared": model.seen}
    model.blocks[0].seen, model.pairs = model.seen, ([model.head],)
    model.seen.append(model.seen)
    twin = Shadow(model).model
    assert twin.blocks[0].seen is twin.seen is twin.known["shared"] and twin.seen is not model.seen
    assert twin.seen[0] is twin.seen and twin.pairs[0][0] is twin.head
    assert twin.known["blocks"][0] is twin.head and twin.known[twin.head] == {twin.again}
    twin.seen.append(1)
    twin.known["blocks"].clear()
    assert len(model.seen) == 1 and model.known["blocks"] == [model.head]


class Wraps(nn.Module):
    """Its methods are wrapped, as metrics' of torchmetrics and patched models of TRL are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen, self.calls = nn.Linear(3, 3), torch.zeros(3), 0
        plain = self.update

        @functools.wraps(plain)
        def update(x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return plain(x)

        def patched(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return original(x) + self.linear.bias

        original = self.forward
        self.update, self.forward = update, types.MethodType(patched, self)

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().sum(0)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.update(self.linear(x))


@pytest.mark.parametrize("in_place", [False, True])
def test_wrapped_methods_of_the_twin_are_its_own(in_place: bool) -> None:
    model = Wraps()
    if in_place:  # what is compiled is another object with the same attributes, which the methods are not bound to
        memopt.in_place.compile_in_place(model, backend="aten")
        shown = calls_of(memopt.in_place.stand_in_of(model)).model
        assert shown is not model
        shadow = Shadow(shown)
    else:
        shadow = Shadow(model)
    (fake,), _ = shadow.inputs([torch.ones(2, 3)], {})
    with shadow.mode:
        result = shadow.model(fake)
    assert isinstance(result, FakeTensor) and shadow.model.calls == 1 and isinstance(shadow.model.seen, FakeTensor)
    assert model.calls == 0 and not isinstance(model.seen, FakeTensor) and model.seen.sum() == 0


def test_hooks_that_the_twin_registers_are_not_the_models() -> None:
    model, ran = Model(), []
    model.head.register_forward_hook(lambda *_: ran.append("model's"))
    twin = Shadow(model).model
    twin.head.register_forward_hook(lambda *_: ran.append("twin's"))
    twin.head.register_forward_pre_hook(lambda *_: None)
    assert len(twin.head._forward_hooks) == 2 and len(model.head._forward_hooks) == 1
    model(torch.ones(2, 4, dtype=torch.int64))
    assert ran == ["model's"]


def test_running_the_twin_touches_nothing() -> None:
    model = Model()
    before = {name: (value.clone(), value._version) for name, value in model.state_dict().items()}
    shadow = Shadow(model)
    ids = torch.ones(2, 4, dtype=torch.int64)
    (fake,), _ = shadow.inputs([ids], {})
    with shadow.mode:
        result = shadow.model(fake)
        result.sum().backward()
    assert isinstance(result, FakeTensor) and result.shape == (2, 4, 5)
    assert shadow.model.head.weight.grad is not None and shadow.model.blocks[1].weight.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name][0]) and value._version == before[name][1]


def test_inputs_are_faked_once_each_and_the_rest_is_as_it_is() -> None:
    model = Model()
    shadow = Shadow(model)
    x, y = torch.ones(2, 3).t(), torch.ones(2, requires_grad=True)
    (first, (second, text)), named = shadow.inputs([x, (x, "text")], {"y": y, "n": 3, "w": model.head.weight})
    assert isinstance(first, FakeTensor) and first is second and first.stride() == (1, 3)
    assert (text, named["n"]) == ("text", 3)
    assert isinstance(named["y"], FakeTensor) and named["y"].requires_grad and not first.requires_grad
    assert named["y"].is_leaf and not isinstance(named["y"], nn.Parameter)
    assert named["w"] is shadow.model.head.weight


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_without_data_will_do(device: str) -> None:
    with torch.device(device):
        model = nn.Linear(2**20, 2**20) if device == "meta" else nn.Linear(2, 3)
    shadow = Shadow(model)
    (fake,), _ = shadow.inputs([torch.empty(4, model.in_features, device=device)], {})
    with shadow.mode:
        result = shadow.model(fake)
    assert result.shape == (4, model.out_features) and result.device.type == "cpu"


def test_names_lead_from_twins_to_real_tensors_under_their_first_name() -> None:
    model = Model()
    shadow = Shadow(model)
    twin = shadow.model
    kind, name, place, left = shadow.names[id(twin.head.weight)]
    assert (kind, name, left) == (InputKind.PARAMETER, "embedding.weight", None)
    assert place().is_set_to(model.head.weight.detach())
    assert shadow.names[id(twin.steps)][:2] == (InputKind.BUFFER, "steps")
    assert shadow.names[id(twin.again.bias)][1] == "blocks.0.bias"
    assert len(shadow.names) == len(model_names(model)) == 7
    real = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(place().is_set_to(real[name].detach()) for _, name, place, _ in shadow.names.values())
    assert all(id(real[name]) in model_names(model) for _, name, _, _ in shadow.names.values())
    assert id(model.table) not in model_names(model)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"part1": nn.Linear(2, 2), "part2": nn.Linear(2, 3)})

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return self.parts[f"part{index.sum()}"](x)


@pytest.mark.parametrize(("index", "width"), [(torch.tensor([0, 1]), 2), (torch.tensor([1, 1]), 3)])
def test_a_scalar_is_formatted_as_its_number(index: torch.Tensor, width: int) -> None:
    shadow = Shadow(Named())
    inputs, _ = shadow.inputs((torch.ones(4, 2), index), {})
    with shadow.mode:
        assert shadow.model(*inputs).shape == (4, width)
        assert f"{inputs[1]}".startswith("FakeTensor") and f"{inputs[1].sum():.2f}" == f"{index.sum():.2f}"


class LooksBehindNorms(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return y * 2 if y.square().mean() > 0.5 else y


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_a_look_at_what_comes_behind_a_norm_leaves_its_statistics_alone(norm: type[nn.Module]) -> None:
    model = LooksBehindNorms(norm(3, track_running_stats=True))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shadow = Shadow(model)
    given, _ = shadow.inputs((torch.linspace(-1, 1, 24).reshape(2, 3, 4),), {})
    with shadow.mode:
        shadow.model(*given)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_names_of_a_module_that_holds_itself() -> None:
    model = Model()
    model.blocks[0].outer = model
    names = model_names(model)
    assert len(names) == 7 and names[id(model.head.weight)].name == "embedding.weight"
