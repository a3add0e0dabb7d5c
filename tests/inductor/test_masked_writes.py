"""A number that is written by a mask does not undo what was written to parts of the same memory before."""

import pytest
import torch
from torch import nn

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler


class Writes(nn.Module):
    def forward(self, x, mask):
        a = torch.zeros(4, 4, device=x.device)
        a.diagonal().copy_(x[0])
        a[mask] = 0.0
        b = x * 1
        b[b > 0] = 0.1
        c = torch.zeros(4, 4, device=x.device).index_copy(0, torch.tensor([1], device=x.device), x[:1])
        c[mask[0]] = 2.0
        d = torch.zeros(4, 4, device=x.device)
        d[mask] = 1.0
        d[:, 1] = x[0]
        d[~mask] = 3.0
        e = torch.as_strided_scatter(torch.zeros(4, 4, device=x.device), x[0], (4,), (5,))
        e[mask] = torch.ones(1, device=x.device)
        f = torch.zeros(4, 4, dtype=torch.double, device=x.device)
        f.diagonal().copy_(x[0])
        f[mask] = 1.0
        return a * 2, x + b.diagonal(), c * 2, d * 2, e * 2, f * 2


@needs_compiler
@pytest.mark.parametrize("training", [True, False])
def test_written_by_a_mask_after_a_part_was_written(training):
    check("cpu", training)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [True, False])
def test_written_by_a_mask_after_a_part_was_written_on_a_gpu(training):
    check("cuda", training)


def check(device, training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    values, mask = torch.randn(4, 4, device=device), torch.rand(4, 4, device=device) > 0.6
    plain = Writes()
    run = memopt.compile(plain, backend="inductor", verify=False)
    seen = []
    for call in (plain, run):
        x = values.clone().requires_grad_(training)
        outputs = call(x, mask)
        if training:
            sum((output.double() ** 2).sum() for output in outputs).backward()
        seen.append((outputs, x.grad))
    torch.testing.assert_close(seen[1], seen[0])
