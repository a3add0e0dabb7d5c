"""Slices of a batch: what they say of the whole."""

import pytest
import torch
from torch import nn

from memopt.memory.cost import table as table_module
from memopt.memory.cost.measure import bytes_needed
from memopt.memory.cost.scratch import workspace_bytes
from memopt.memory.cost.slices import batch_of, slices_of
from memopt.memory.cost.table import CostTable
from memopt.torch_compat.recurrent_layers import RECURRENT, RECURRENT_BACKWARD
from tests.memory.cost.build import GEOMETRY, aten, call


def recurrent(kind, *, backward, batch=32):
    module, x = kind(32, 64), torch.randn(64, batch, 32)
    states = [torch.zeros(1, batch, 64) for _ in range(2 if kind is nn.LSTM else 1)]
    weights = [weight.detach() for weight in module.parameters()]
    how = module.mode, True, 1, True, False, None, 1
    if not backward:
        return call(RECURRENT, x, states, weights, *how)
    output, *others = RECURRENT(x, states, weights, *how)
    wanted = [True, *(False for _ in states), *(True for _ in weights)]
    return call(RECURRENT_BACKWARD, [output], [0], others[len(states) :], x, states, weights, wanted, *how)


X, Y, W = torch.randn(16, 16, 16, 16), torch.randn(16, 32, 16, 16), torch.randn(32, 16, 3, 3)
LAST = X.to(memory_format=torch.channels_last)
CASES = {
    "convolution": lambda: call(aten.convolution.default, X, W, None, *GEOMETRY),
    "channels last": lambda: call(aten.convolution.default, LAST, W, None, *GEOMETRY),
    "backward": lambda: call(aten.convolution_backward.default, Y, X, W, [32], *GEOMETRY, [True, True, True]),
    "lstm": lambda: recurrent(nn.LSTM, backward=False),
    "lstm backward": lambda: recurrent(nn.LSTM, backward=True),
    "gru backward": lambda: recurrent(nn.GRU, backward=True),
}


@pytest.mark.parametrize("made", CASES.values(), ids=CASES.keys())
def test_what_does_not_fit_is_measured_by_slices_that_do(made, monkeypatch, tmp_path):
    """A first step in bytes was 1.2 of its budget, as backward through an LSTM was run that was planned in pieces."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    node, runs = made(), []
    whole = CostTable().cost(node)
    assert whole.measured
    room = bytes_needed(node) + workspace_bytes(node) - 1
    measured = table_module.measure_operators
    monkeypatch.setattr(
        table_module, "measure_operators", lambda nodes, *rest: runs.extend(nodes) or measured(nodes, *rest)
    )
    found = CostTable(ceiling_bytes=2**30, room=lambda: room).cost(node)
    assert [batch_of(each) for each in runs] == [batch_of(node) // 8, batch_of(node) // 4]
    assert not found.measured and found.output_bytes == whole.output_bytes
    assert abs(found.workspace_bytes - whole.workspace_bytes) <= 0.02 * whole.workspace_bytes


def test_of_a_small_batch_and_of_other_operators_there_are_none():
    small = call(aten.convolution.default, X[:7], W, None, *GEOMETRY)
    assert batch_of(small) == 7 and slices_of(small) == []
    assert batch_of(call(aten.mm.default, *torch.randn(2, 8, 8).unbind())) == 0


def test_nothing_is_run_for_what_is_only_looked_up(monkeypatch, tmp_path):
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    node = CASES["convolution"]()
    table = CostTable(room=lambda: bytes_needed(node))
    assert table.known(node) is None
    assert table.cost(node).workspace_bytes == table.known(node).workspace_bytes
