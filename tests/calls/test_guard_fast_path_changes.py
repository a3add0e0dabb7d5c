"""The guard fast path sees what changes between calls: weights, inputs, modes and code."""

import pytest
import torch
from torch import nn

from tests.calls.test_guard_fast_path import Net, image, net, same, steady, ways

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


ENGINES = ["aten", "static", "inductor"]


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ENGINES)
def test_weights_that_change_are_seen(backend):
    model, x = net(), image()
    compiled = steady(model, x, backend=backend)
    with ways(compiled) as taken:
        with torch.no_grad():
            model.conv.weight.add_(0.5)
            model.shift.mul_(2.0)
        same(compiled, model, x)
        model.load_state_dict(net().state_dict())
        same(compiled, model, x)
        compiled.load_state_dict(net().state_dict())
        same(compiled, model, x)
        model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
        model.conv.weight = nn.Parameter(torch.randn_like(model.conv.weight))
        model.shift = torch.randn_like(model.shift)
        same(compiled, model, x)
        model.head.bias.data = torch.randn_like(model.head.bias)
        model.norm.bias.data = torch.randn_like(model.norm.bias)
        same(compiled, model, x)
    assert taken == ["short"] * 5  # all of it is read, or looked at, where the weights lie
    model.float()
    same(compiled, model, x.float(), tolerance=1e-4)
    compiled.double()
    same(compiled, model, x)


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ENGINES)
def test_inputs_that_change_are_seen(backend):
    model = net()
    compiled = steady(model, image(), backend=backend)
    wide, crossed = image(2, 2, 7, 9), image(2, 2, 6, 6).transpose(2, 3)
    for x in (image(1, 2, 6, 6), wide, crossed, image(2, 2, 6, 6).to(memory_format=torch.channels_last), image()):
        same(compiled, model, x)
    for x in (wide, crossed):  # compiled anew where weights were laid out for other inputs
        same(compiled, model, x)
    with ways(compiled) as taken:
        for x in (wide, image(), wide, crossed):
            same(compiled, model, x)
    assert taken == ["short"] * 4
    with torch.no_grad(), pytest.raises(RuntimeError):
        compiled(image().float())
    same(compiled, model, image())


def test_a_mode_that_changes_is_seen():
    model, x = net(), image()
    compiled = steady(model, x)
    compiled.train()
    model.norm.eval()
    with torch.no_grad():
        torch.manual_seed(0)
        found = compiled(x)
        torch.manual_seed(0)
        torch.testing.assert_close(found, model(x))
        assert not torch.equal(compiled(x), compiled(x))
    compiled.eval()
    same(compiled, model, x)
    model.drop.train()
    with torch.no_grad():
        assert not torch.equal(compiled(x), compiled(x))
    model.drop.eval()
    same(compiled, model, x)


def test_gradients_are_as_asked_for():
    model, x = net(), image()
    compiled = steady(model, x)
    found, expected = compiled(x), model(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    gradient = model.head.weight.grad.clone()
    model.zero_grad()
    expected.sum().backward()
    torch.testing.assert_close(gradient, model.head.weight.grad)
    with torch.no_grad():
        assert not compiled(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
        torch.testing.assert_close(compiled(x), model(x))
    with ways(compiled) as taken:
        same(compiled, model, x)
    assert taken == ["short"]


def test_autocast_is_seen():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.randn(3, 4)
    compiled = steady(model, x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert compiled(x).dtype == torch.bfloat16
        assert compiled(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert compiled(x).dtype == torch.float32


@pytest.mark.long
def test_python_values_that_change_are_seen(monkeypatch):
    model, x = net(), image()
    compiled = steady(model, x)
    model.scale = 5.0
    same(compiled, model, x)
    model.drop.p, model.norm.eps = 0.1, 0.5
    same(compiled, model, x)
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    same(compiled, model, x)
    monkeypatch.setattr(Net.forward, "__defaults__", (4.0,))
    same(compiled, model, x)
    monkeypatch.setattr(Net.forward, "__kwdefaults__", {"extra": torch.ones(4, dtype=torch.float64)})
    same(compiled, model, x)
    model.norm = nn.BatchNorm2d(3, affine=False).double().eval()
    same(compiled, model, x)
    with ways(compiled) as taken:
        same(compiled, model, x)
    assert taken == ["short"]


def test_another_forward_is_seen(monkeypatch):
    model, x = net(), image()
    compiled = steady(model, x)
    model.forward = lambda x: x + 1
    same(compiled, model, x)
    del model.forward
    same(compiled, model, x)
    monkeypatch.setattr(Net, "forward", lambda self, x: x + 2)
    same(compiled, model, x)
    monkeypatch.undo()
    same(compiled, model, x)
    model.head.forward = lambda x: x.sum(1, keepdim=True) + 1
    same(compiled, model, x)
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x)
    same(compiled, model, x)


def test_code_that_is_replaced_in_a_function_is_seen(monkeypatch):
    model, x = net(), image()
    compiled = steady(model, x)

    def forward(self, x, factor=1.0, *, extra=None):
        return x - 1

    monkeypatch.setattr(Net.forward, "__code__", forward.__code__)
    same(compiled, model, x)


def test_weights_of_another_dtype_or_layout_are_seen():
    model, x = net(), image()
    compiled = steady(model, x, backend="inductor")
    model.conv.weight.data = model.conv.weight.detach().to(memory_format=torch.channels_last)
    same(compiled, model, x)
    model.head.weight.data = model.head.weight.detach().t().contiguous().t()
    same(compiled, model, x)
    model.head.weight.data = model.head.weight.detach().float()
    with torch.no_grad(), pytest.raises(RuntimeError):
        compiled(x)
