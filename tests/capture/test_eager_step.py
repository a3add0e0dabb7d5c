"""What eager itself holds in a graph, counted on fake tensors, is what it is seen to hold."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.capture.eager_step import eager_step, has_checkpoints
from memopt.memory.cost.table import CostTable
from memopt.step.graph_peaks import step_peak
from memopt.torch_compat.recurrent_layers import RECURRENT

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _seen(model, x):
    seen = []

    def backend(graph_module, example_inputs):
        step = eager_step(graph_module, example_inputs)
        seen.append((None if step is None else step.peaks(), has_checkpoints(graph_module)))
        return graph_module

    torch.compile(model, backend=backend)(x)
    return seen[0]


class Net(nn.Module):
    def __init__(self, checkpointed):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False) if self.checkpointed else block(x)
        return x.square().mean()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_counts_what_eager_holds(checkpointed):
    x, model = torch.randn(64, 16), Net(checkpointed)
    model(x).backward()
    model.zero_grad()
    measured = memopt.measure(lambda: model(x).backward()).peak_bytes
    model.zero_grad()
    peaks, found = _seen(model, x)
    assert found is checkpointed
    assert measured * 0.98 <= step_peak([peaks]) <= measured


def test_leaves_the_random_stream_and_the_inputs_alone():
    x, model = torch.randn(8, 16, requires_grad=True), nn.Sequential(nn.Linear(16, 16), nn.Dropout())
    state = torch.get_rng_state()
    peaks = []

    def backend(graph_module, example_inputs):
        peaks.append(eager_step(graph_module, example_inputs).peaks())
        assert torch.equal(torch.get_rng_state(), state)
        return graph_module

    torch.compile(model, backend=backend)(x)
    assert peaks[0] is not None and x.grad is None and model[0].weight.grad is None


def test_says_nothing_of_what_needs_no_gradients():
    model = nn.Linear(4, 4).requires_grad_(False)
    assert _seen(model, torch.randn(2, 4))[0] is None


@pytest.mark.parametrize("steps", [40, 200])
@pytest.mark.parametrize(("kind", "within"), [(nn.LSTM, 0.2), (nn.GRU, 0.01), (nn.RNN, 0.01)])
def test_recurrent_layers_count_as_eager_runs_them(kind, within, steps):
    module, x, state = kind(16, 64), torch.randn(steps, 24, 16), torch.zeros(1, 24, 64)
    count = 2 if kind is nn.LSTM else 1

    def loss(x, state, *weights):
        found = RECURRENT(x, [state] * count, list(weights), module.mode, True, 1, True, False, None)
        return found[0].square().mean()

    def eager():
        output, _ = module(x, (state, state) if kind is nn.LSTM else state)
        return torch.autograd.grad(output.square().mean(), list(module.parameters()))

    graph = fx.symbolic_trace(lambda x, state, a, b, c, d: loss(x, state, a, b, c, d))
    peaks = eager_step(graph, [x, state, *module.parameters()]).peaks()
    eager()
    expected = memopt.measure(eager).peak_bytes
    assert abs(max(peaks.forward, peaks.backward) - expected) <= within * expected


def test_what_operators_take_while_they_run_is_counted_where_a_table_is_given():
    seen = []

    def backend(graph_module, example_inputs):
        step = eager_step(graph_module, example_inputs)
        seen.append((step.peaks(), step.peaks(CostTable())))
        return graph_module.forward

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    torch.compile(model, backend=backend)(torch.randn(2, 3, 32, 32, requires_grad=True))
    ((plain, whole),) = seen
    assert whole.backward > plain.backward and (whole.saved, whole.left) == (plain.saved, plain.left)


class Counted(nn.Module):
    """A layer that writes to buffers of its own, or to none."""

    def __init__(self, kind):
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if kind == "norm" else nn.LayerNorm(16)
        self.register_buffer("seen", torch.zeros(16))
        self.kind = kind

    def forward(self, x):
        if self.kind == "own":
            self.seen.add_(x.detach().mean(0))
        return torch.tanh(self.norm(x))


@pytest.mark.parametrize(
    ("kind", "named"), [("norm", "norm.num_batches_tracked and 2 more"), ("own", "seen"), ("", "")]
)
@pytest.mark.parametrize("reentrant", [True, False])
def test_buffers_that_eager_writes_to_again_in_backward_are_said_once(kind, named, reentrant, caplog):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Counted(kind)

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=reentrant)

    run = memopt.compile(Model(), backend="aten")
    for _ in range(2):
        run(torch.ones(4, 16, requires_grad=True)).sum().backward()
    told = [record.getMessage() for record in caplog.records if "torch.utils.checkpoint" in record.getMessage()]
    assert len(told) == bool(named) == any("torch.utils.checkpoint" in note for note in run.report.notes)
    assert not named or f"part.{named} " in told[0]
