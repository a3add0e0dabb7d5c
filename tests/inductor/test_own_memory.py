"""Outputs of compiled code share the memory that the model's share, and no other."""

import copy

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.facts import shared_memory
from tests.inductor.test_peak_lower_bound import needs_compiler


class Idle(nn.Module):
    """Outputs that Inductor finds equal to an input, to each other, or to a view of these."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.register_buffer("zeros", torch.randn(4))

    def forward(self, x, z):
        self.zeros.zero_()
        y = torch.tanh(x * self.weight)
        moved = x.t() + self.zeros.unsqueeze(1)
        return {
            "input": z - self.zeros,
            "views": [moved[1:], moved.t()],
            "expanded": (z[0] + self.zeros).expand(3, -1),
            "result": y,
            "beside": y * torch.ones_like(y),
            "view of result": y.t(),
            "again": (y + 0 * torch.ones(4)).t(),
            "parameter": self.weight + torch.zeros(4),
        }


@needs_compiler
@pytest.mark.parametrize("training", [True, False])
def test_outputs_share_the_memory_that_the_models_share(training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Idle()
    model = copy.deepcopy(plain)
    run = memopt.compile(model, backend="inductor", verify=False)  # else the model itself would run
    seen = []
    for call in (plain, run):
        given = {"x": torch.linspace(0, 1, 24).reshape(6, 4), "z": torch.linspace(0, 1, 8).reshape(2, 4)}
        with torch.set_grad_enabled(training):
            found = call(*given.values())
        one, other = found.pop("views")
        given["weight"] = model.weight if call is run else plain.weight
        outputs = {**found, "one view": one, "other view": other}
        seen.append(
            (shared_memory({**outputs, **given}), {k: (v.shape, v.stride()) for k, v in outputs.items()}, outputs)
        )
    assert seen[0][:2] == seen[1][:2]
    torch.testing.assert_close(seen[1][2], seen[0][2])


class Joined(nn.Module):
    """Outputs that Inductor computes where another output has them, and outputs that share what is assigned to them."""

    def forward(self, x):
        y, z = x.exp(), x.sin()
        filled = x.cos()
        filled.t()[...] = 0.7
        part = filled.split(2)[0].t()
        return y.t(), torch.stack([y, z]), torch.cat([z, y], 1), z[1:], part, part.view_as(part)


@needs_compiler
@pytest.mark.parametrize("training", [True, False])
def test_what_is_concatenated_and_what_is_assigned_have_memory_as_in_the_model(training):
    torch._dynamo.reset()
    plain = Joined()
    run = memopt.compile(plain, backend="inductor", verify=False)
    seen = []
    for call in (plain, run):
        outputs = call(torch.linspace(0, 1, 16).reshape(4, 4).requires_grad_(training))
        seen.append((shared_memory({str(place): value for place, value in enumerate(outputs)}), outputs))
    assert seen[0][0] == seen[1][0]
    torch.testing.assert_close(seen[1][1], seen[0][1])
