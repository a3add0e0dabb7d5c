"""A tensor whose sizes are marked as dynamic is planned at the sizes that it has."""

import pytest
import torch
from torch import nn

import memopt


@pytest.mark.quick("1GB-True-mark_dynamic", "None-False-maybe_mark_dynamic")
@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("budget", [None, "1GB"])
def test_marked_sizes_are_planned_as_they_are(budget, train, mark):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).train(train)
    compiled = memopt.compile(model, budget, backend="aten")
    with torch.set_grad_enabled(train):
        for rows in (6, 9):
            x = torch.randn(rows, 8)
            mark(x, 0)
            torch.testing.assert_close(compiled(x), model(x))
            assert compiled.report.notes == ()
