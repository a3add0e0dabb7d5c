"""Attributes that `__getattr__` answers for: one that is set afterwards is seen."""

import pytest
import torch
from torch import nn

import memopt


class Answers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def __getattr__(self, name):
        return 0.5 if name in ("scale", "shift") else super().__getattr__(name)

    def forward(self, x):
        return self.layer(x) * self.scale + self.shift


class Config:
    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return 0.5


class Configured(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.config = nn.Linear(3, 3), Config()

    def forward(self, x):
        return self.layer(x) * self.config.scale + getattr(self.config, "shift", 0.0)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Answers()

    def forward(self, x):
        return self.part(x).relu()


OF = {
    "model": (Answers, lambda model: model),
    "part": (Inner, lambda model: model.part),
    "object": (Configured, lambda model: model.config),
}


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("of", OF)
def test_what_is_set_and_deleted_afterwards_is_seen(of, gradients):
    kind, owner = OF[of]
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 3)
    compiled = memopt.compile(model, backend="aten", verify=False)

    def check():
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(compiled(x), model(x))

    check()
    owner(compiled).scale = 0.25
    check()
    owner(model).shift = 3.0
    check()
    del owner(model).scale
    check()
