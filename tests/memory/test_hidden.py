"""What operators take that fake tensors do not show."""

import pytest
import torch
from torch import nn

import memopt
from memopt.capture.eager_call import eager_call
from memopt.memory.cost.table import CostTable
from memopt.memory.hidden import WholeLedger
from memopt.step.graph_peaks import step_peak


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("length", [20, 150], ids=["short", "beyond what is run for it"])
def test_a_recurrent_layer_s_workspace_is_counted_as_it_is_measured(kind, length):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = kind(16, 32)

        def forward(self, x):
            return self.layer(x)[0].square().mean()

    model, x = Net(), torch.randn(length, 4, 16)
    model(x).backward()
    model.zero_grad()
    found = eager_call(model, (x,), {}, CostTable())
    measured = memopt.measure(lambda: model(x).backward()).peak_bytes
    assert measured <= step_peak([found.peaks]) <= 1.35 * measured


def test_other_operators_are_counted_as_by_any_ledger():
    ledger = WholeLedger(torch.device("cpu"))
    with ledger:
        x = torch.ones(64)
        del x
    assert ledger.peak == 256 and ledger.live == 0
