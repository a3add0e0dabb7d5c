"""In double precision a loop's numbers are eager's to the last places: what differs in single precision is rounding.

Adam divides a gradient by its own size. A bias before a batch norm, whose gradient is nothing but rounding, and a unit
that hardly ever acts go by that rounding's sign, so that weights differ by 1e-3 after some steps in single precision.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import memopt

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
STEPS = 4


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _carried_state(compiled):
    """A recurrent layer's state goes from step to step, detached."""
    model, head = nn.GRU(16, 24, batch_first=True), nn.Linear(24, 8)
    both = nn.ModuleList([model, head])
    optimizer = torch.optim.AdamW(both.parameters(), 1e-3)
    call, state = compiled(model, optimizer), torch.zeros(1, 8, 24)
    for _ in range(STEPS):
        out, state = call(torch.randn(8, 12, 16), state.detach())
        optimizer.zero_grad()
        loss = head(out).logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        yield both, loss


def _target_network(compiled):
    """Convolutions learn of a copy of themselves that is set to them every second step."""
    model = nn.Sequential(
        *(nn.Conv2d(2, 8, 4, 2), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(16 * 25, 32), nn.ReLU(), nn.Linear(32, 4)),
    )
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    call = compiled(model, optimizer)
    for number in range(STEPS):
        with torch.no_grad():
            wanted = 0.99 * target(torch.randn(32, 2, 16, 16)).amax(1)
        found = call(torch.randn(32, 2, 16, 16)).gather(1, torch.randint(0, 4, (32, 1)))[:, 0]
        loss = F.smooth_l1_loss(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 2:
            target.load_state_dict(model.state_dict())
        yield model, loss


def _spectral_norm(compiled):
    """Of a discriminator that is called twice a step, and looks in between at what it is not to learn of."""
    norm = parametrizations.spectral_norm
    model = nn.Sequential(
        norm(nn.Linear(16, 64)), nn.LeakyReLU(0.1), norm(nn.Linear(64, 64)), nn.Tanh(), nn.Linear(64, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.0, 0.9))
    call = compiled(model, optimizer)
    for _ in range(STEPS):
        loss = F.relu(1 - call(torch.randn(256, 16))).mean() + F.relu(1 + call(torch.randn(256, 16))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            call(torch.randn(256, 16))
        yield model, loss


@pytest.mark.quick("_carried_state-0.9", "_target_network-0.9")
@pytest.mark.parametrize("budget", [0.9, None])
@pytest.mark.parametrize("steps", [_carried_state, _target_network, _spectral_norm])
def test_weights_buffers_and_losses_are_eagers(steps, budget) -> None:
    def trained(compiled):
        torch.manual_seed(0)
        found = [(model, loss.detach()) for model, loss in steps(compiled)]
        return [loss for _, loss in found], found[-1][0].state_dict()

    wanted = trained(lambda model, optimizer: model)
    found = trained(lambda model, optimizer: memopt.compile(model, budget, optimizer=optimizer, backend="aten"))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
