"""A step on fake tensors, with what its operators take while they run."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.capture.eager_call import eager_call
from memopt.memory.cost.table import CostTable
from memopt.step.graph_peaks import step_peak


@pytest.mark.parametrize("accumulating", [False, True])
def test_a_step_is_counted_as_it_is_measured(accumulating):
    # A softmax that is sorted: sorting has scratch of its own.
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 64)

        def forward(self, x):
            y = self.second(self.first(x).tanh())
            return y.softmax(-1).sort(-1).values.square().mean()

    model, x = Net(), torch.randn(64, 32)
    model(x).backward()
    if not accumulating:
        model.zero_grad()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    found = eager_call(model, (x,), {}, CostTable())
    assert all(
        a is b is None or torch.equal(a, b) for a, b in zip(before, (p.grad for p in model.parameters()), strict=True)
    )
    measured = memopt.measure(lambda: model(x).backward())
    assert measured.peak_bytes <= step_peak([found.peaks]) <= 1.02 * measured.peak_bytes + 16
    made = sum(size for _, size in found.peaks.gradients)
    assert made == (0 if accumulating else sum(p.nbytes for p in model.parameters())) and not found.by_values


class Columns(nn.Module):
    """Columns of an image that are folded again: eager keeps memory of theirs for what is folded, and its gradients."""

    def forward(self, x):
        columns = F.unfold(x.view(2, 4, 16, 16).exp(), 3, padding=1)
        return F.fold(columns.sin(), (16, 16), 3, padding=1).sin().mean()


@pytest.mark.parametrize("loss", [F.mse_loss, F.binary_cross_entropy, None])
def test_results_that_keep_more_than_their_sizes_say_are_counted(loss):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(32, 64))

        def forward(self, y):
            x = self.weight.sigmoid()
            return Columns()(x) if loss is None else loss(x, y)

    model, y = Net(), torch.rand(32, 64)
    found = eager_call(model, (y,), {}, CostTable())
    forward, step = memopt.measure(model, y).peak_bytes, memopt.measure(lambda: model(y).backward()).peak_bytes
    for measured, counted in ((forward, found.peaks.forward), (step, step_peak([found.peaks]))):
        assert measured <= counted <= 1.02 * measured + 64


def test_inference_and_what_fake_tensors_cannot_say():
    x = torch.randn(8, 8)
    found = eager_call(nn.Linear(8, 8), (x,), {}, CostTable(), backward=False)
    assert found.peaks.forward == x.nbytes and found.peaks.gradients == ()

    class Asks(nn.Module):
        def forward(self, x):
            return x.cumsum(0).nonzero()

    assert eager_call(Asks(), (x,), {}, CostTable(), backward=False).by_values
    assert eager_call(Asks(), (x.to("meta"),), {}, CostTable(), backward=False) is None


def test_a_packed_sequence_is_counted_by_its_lengths():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells = nn.LSTM(4, 8, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.cells(packed)[1][0]

    model, x = Packed(), torch.randn(4, 6, 4)
    found = [eager_call(model, (x, lengths), {}, None) for lengths in (torch.tensor([6, 2, 3, 1]), torch.full((4,), 6))]
    assert all(call.by_values and not call.by_chance for call in found)
    assert found[0].peaks.saved < found[1].peaks.saved


_MODELS = []


def test_ways_by_random_numbers_are_known_and_no_gradient_of_the_model_is_reached():
    class Drops(nn.Linear):
        def forward(self, x):
            return super().forward(x) if torch.rand([]) < 2 else x

    assert eager_call(Drops(4, 4), (torch.randn(2, 4),), {}, None).by_chance
    model = nn.Linear(4, 4)
    _MODELS[:] = [model]
    model.forward = lambda x: nn.Linear.forward(_MODELS[0], x)  # the model's own, which its twin cannot have
    assert eager_call(model, (torch.randn(2, 4),), {}, None) is None and model.weight.grad is None
    model = nn.Linear(4, 4)
    model.forward = torch.compiler.disable(model.forward)  # which the twin has of itself
    assert eager_call(model, (torch.randn(2, 4),), {}, None) is not None and model.weight.grad is None
