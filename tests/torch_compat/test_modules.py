from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from memopt.torch_compat import modules


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def straight(model: nn.Module) -> bool:
    return modules.goes_straight(model, Plain, Plain.forward)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_lies_under_a_name_also_of_a_module_that_is_torchscripts() -> None:
    layer = nn.BatchNorm1d(2, affine=False)
    for module in (layer, torch.jit.trace(layer.eval(), torch.ones(1, 2))):
        found = modules.held_by(module, "running_mean")
        assert found is not None and torch.equal(found, torch.zeros(2))
        assert modules.held_by(module, "weight") is None and modules.held_by(module, "other") is None


def test_what_a_module_has_itself() -> None:
    model = Plain()
    assert dict(modules.own_parameters(model)) == {"scale": model.scale}
    assert dict(modules.own_modules(model)) == {"inner": model.inner}
    assert modules.own_parameters(model.inner)["bias"] is None


def test_tensors_are_changed_with_those_of_the_modules_within_or_without() -> None:
    model = Plain()
    modules.change_tensors(model, lambda tensor: tensor.double(), recurse=False)
    assert (model.scale.dtype, model.inner.weight.dtype) == (torch.float64, torch.float32)
    modules.change_tensors(model, lambda tensor: tensor.double())
    assert model.inner.weight.dtype is torch.float64


def test_a_call_goes_straight_without_hooks_and_overrides() -> None:
    model = Plain()
    assert straight(model)
    hook = model.register_forward_hook(lambda *_: None)
    assert not straight(model)
    hook.remove()
    hook = model.register_full_backward_hook(lambda *_: None)
    assert not straight(model)
    hook.remove()
    hook = register_module_forward_hook(lambda *_: None)
    assert not straight(model)
    hook.remove()
    assert straight(model)
    model.forward = lambda x: x  # type: ignore[method-assign]
    assert not straight(model)
    assert not straight(type("Child", (Plain,), {})())


def test_hooks_behind_accumulation_are_found() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not modules.hooks_after_accumulation(parameter) and not modules.is_stepped_in_backward(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert len(modules.hooks_after_accumulation(parameter) or {}) == 1
    handle.remove()
    assert not modules.hooks_after_accumulation(parameter)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch is not distributed")
def test_no_replica_runs_here() -> None:
    assert modules.running_replica() is None


def test_hooks_that_see_what_forward_returns_are_those_around_its_call() -> None:
    module, found = nn.Linear(2, 2), list[Any]()

    def look(*given: Any) -> None:
        pass

    def forward(x: torch.Tensor) -> torch.Tensor:
        frame = sys._getframe(1)
        found.append((modules.calls_hooks(frame), modules.hooks_behind(module)))
        return x

    module.forward = forward
    module(torch.ones(2))
    handles = [module.register_forward_hook(look), module.register_full_backward_hook(look)]
    module(torch.ones(2, requires_grad=True))
    handles[0].remove()
    module(torch.ones(2, requires_grad=True))
    assert found == [(False, []), (True, [look, look]), (True, [look])]


def test_which_parameters_are_trained_is_told_in_the_order_of_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)), nn.ReLU())
    model[0].bias.requires_grad_(False)
    assert modules.requires_gradients(model) == (True, False, True)
    model.append(model[0])
    assert modules.requires_gradients(model) == (True, False, True), "a module that comes twice is gone through once"
