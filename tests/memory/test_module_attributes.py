"""What modules have as attributes: own ones that may change in a call, and hooks; numbers and what is empty aside."""

from __future__ import annotations

from torch import nn

from memopt.memory.module_attributes import attributes_of
from memopt.torch_compat.modules import modules_of


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.count, self.kept, self.options = nn.Linear(2, 2), 3, [], {"a": 1}


def test_own_containers_are_found_empty_or_not_and_hooks_where_there_are_any():
    model = Own()
    handle = model.inner.register_forward_hook(lambda *_: None)
    outer, inner = attributes_of(model.modules())
    assert [name for name, _ in outer.others] == ["kept", "options"] and not outer.hooks
    assert outer.known["count"] == 3 and outer.held is vars(model) and outer.known is not outer.held
    assert [name for name, _ in inner.hooks] == ["_forward_hooks"] and inner.kind is nn.Linear
    assert not inner.others, "sizes are numbers"
    handle.remove()
    assert not attributes_of([model.inner])[0].hooks


def test_modules_come_in_torchs_own_order_each_once():
    shared = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    model = nn.ModuleList([nn.Sequential(shared, nn.Tanh()), shared, nn.ModuleDict({"a": shared[1], "b": nn.GELU()})])
    model.none = None
    model.register_module("left_out", None)
    assert modules_of(model) == list(model.modules())
