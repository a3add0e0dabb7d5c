"""Options: what a compilation was asked for."""

import torch
from torch import nn

from memopt.backends.aten import AtenBackend
from memopt.memory.cost.devices import DEVICES
from memopt.options import Options


def options(**given):
    asked = {"budget": None, "optimizer": None, "engine": AtenBackend(), "passes": None, "verify": True, **given}
    return Options(**asked)


def test_a_step_is_planned_for_the_models_own_device_unless_another_is_named():
    assert options().place is None
    assert options(target=DEVICES["h100"]).place.type == "cuda"


def test_an_optimizer_is_looked_at_and_never_stepped():
    model = nn.Linear(8, 8)
    before = [weight.detach().clone() for weight in model.parameters()]
    assert options().counted(list(model.parameters())) is None
    optimizer = torch.optim.AdamW(model.parameters())
    assert options(optimizer=optimizer).counted(list(model.parameters())).footprint.state_bytes >= 2 * 72 * 4
    assert not optimizer.state
    torch.testing.assert_close(list(model.parameters()), before)
