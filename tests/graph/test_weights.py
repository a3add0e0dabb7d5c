"""Weights are found where modules hold them now, and nothing of a program keeps those that were there before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils import swap_tensors

from memopt.graph.weights import Held, Weights, by_itself, elsewhere, held, joined, only, same_source
from memopt.torch_compat.fake_tensors import FakeTensorMode


def same(found, value):
    return found.is_set_to(value) and not found.requires_grad


def replaced(layer):
    layer.weight = nn.Parameter(torch.randn(2, 3))


def set_by_data(layer):
    layer.weight.data = torch.randn(2, 3)


def swapped(layer):
    swap_tensors(layer.weight, nn.Parameter(torch.randn(2, 3)))


def assigned(layer):
    layer.load_state_dict({"weight": torch.randn(2, 3), "bias": torch.randn(2)}, assign=True)


@pytest.mark.parametrize("change", [replaced, set_by_data, swapped, assigned])
def test_what_a_module_holds_now_is_found_and_what_it_held_is_freed(change):
    layer = nn.Linear(3, 2)
    state = Weights({"weight": held(layer, "weight")})
    assert same(state["weight"], layer.weight)
    before = weakref.ref(layer.weight.untyped_storage())
    change(layer)
    gc.collect()
    assert same(state["weight"], layer.weight) and before() is None


def cast(layer):
    layer.double()


def reshaped(layer):
    layer.weight = nn.Parameter(torch.randn(3, 3))


def laid_out_otherwise(layer):
    layer.weight = nn.Parameter(torch.randn(3, 2).t())


def to_meta(layer):
    layer.to("meta")


def deleted(layer):
    del layer.weight


def unset(layer):
    layer.weight = None


@pytest.mark.parametrize("change", [cast, reshaped, laid_out_otherwise, to_meta, deleted, unset])
def test_what_is_nothing_like_the_weight_that_was_there_is_not_in_the_state(change):
    layer = nn.Linear(3, 2)
    state = joined({"constant": torch.ones(1)}, {"weight": held(layer, "weight")})
    assert list(state) == ["constant", "weight"] and len(state) == 2
    change(layer)
    assert "weight" not in state and state.get("weight") is None and list(state) == ["constant"] and len(state) == 1
    with pytest.raises(KeyError):
        state["weight"]


def test_neither_a_module_nor_its_tensors_are_kept_alive():
    layer = nn.BatchNorm1d(3)
    state = Weights({name: held(layer, name) for name in ("weight", "running_mean")})
    assert same(state["running_mean"], layer.running_mean)
    alive = [weakref.ref(layer), *(weakref.ref(each.untyped_storage()) for each in (layer.weight, layer.running_mean))]
    del layer
    gc.collect()
    assert [each() for each in alive] == [None] * 3 and not len(state)


def test_a_tensor_whose_module_is_not_known_is_not_kept_alive_either():
    value = nn.Parameter(torch.ones(2))
    found = by_itself(value)
    assert isinstance(found, Held) and same(found(), value)
    with torch.no_grad():
        value.add_(1)
    assert found()._version == value._version == 1  # by which what was read of it is known to be out of date
    del value
    gc.collect()
    assert found() is None


def test_what_has_no_value_is_not_known():
    with torch.inference_mode():
        inference = torch.ones(2)
    with FakeTensorMode():
        fake = torch.ones(2)
    assert [by_itself(each) for each in (inference, fake, torch.ones(2, device="meta"))] == [None] * 3


def test_under_a_mode_of_fake_tensors_weights_are_real():
    layer = nn.Linear(3, 2)
    state = Weights({"weight": held(layer, "weight")})
    with FakeTensorMode():
        found = state["weight"]
    assert same(found, layer.weight)


def test_parts_are_joined_and_left_out_without_a_look_at_weights():
    layer, constant = nn.Linear(3, 2), torch.ones(1)
    first = joined({"constant": constant}, {"weight": held(layer, "weight"), "bias": held(layer, "bias")})
    second = only(joined(first, {"constant": torch.zeros(1), "other": torch.zeros(1)}), {"weight", "constant"})
    assert sorted(second) == ["constant", "weight"] and not second["constant"].any()
    assert same_source(first, second, "weight") and not same_source(first, second, "constant")
    layer.weight = nn.Parameter(torch.zeros(2, 3))
    assert same(first["weight"], layer.weight) and same(second["weight"], layer.weight)


def test_of_given_tensors_those_are_told_that_lie_elsewhere():
    layer, other = nn.Linear(3, 2), torch.ones(2)
    state = Weights({"weight": held(layer, "weight"), "bias": held(layer, "bias")})
    given = {"weight": layer.weight.detach(), "bias": other, "new": other}
    assert elsewhere(given, state) == {"bias": other, "new": other}
