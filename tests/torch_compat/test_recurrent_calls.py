"""Models with recurrent layers, captured whole: eager's numbers, states, and random numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import memopt
from tests.end_to_end import gradients

pytestmark = [pytest.mark.filterwarnings("ignore:LSTM with projections"), pytest.mark.usefixtures("fresh_dynamo")]


class Tagger(nn.Module):
    """A recurrent network between two layers; its states go in and out."""

    def __init__(self, kind, **options):
        super().__init__()
        self.first, self.rnn = nn.Linear(4, 6), kind(6, 8, **options)
        self.last = nn.LazyLinear(3)

    def forward(self, x, states=None):
        output, states = self.rnn(self.first(x), states)
        return self.last(output.tanh()), states


def twins(kind, x, **options):
    torch.manual_seed(0)
    model = Tagger(kind, **options)
    model(x)
    return model, copy.deepcopy(model)


def leaves(states):
    return [states] if isinstance(states, torch.Tensor) else list(states)


def loss_of(found, states):
    return found.square().sum() + sum(state.sin().sum() for state in leaves(states))


CASES = {
    "gru-dropout": (nn.GRU, {"num_layers": 3, "dropout": 0.3, "batch_first": True}),
    "lstm-both": (nn.LSTM, {"num_layers": 2, "bidirectional": True, "dropout": 0.2}),
    "lstm-projected": (nn.LSTM, {"proj_size": 5, "num_layers": 2}),
    "rnn-relu": (nn.RNN, {"nonlinearity": "relu", "bias": False, "batch_first": True}),
    "rnn-tanh": (nn.RNN, {"bidirectional": True}),
}


@pytest.mark.quick("aten-gru-dropout", "aten-lstm-both", "inductor-rnn-tanh")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_training_is_eagers_states_and_random_numbers_included(case, backend):
    kind, options = CASES[case]
    if backend == "inductor":
        options = {**options, "dropout": 0.0}  # its kernels draw numbers of their own
    x = torch.randn(5, 2, 4)
    model, plain = twins(kind, x, **options)
    run = memopt.compile(model, backend=backend, verify="full")
    before: dict[nn.Module, list[torch.Tensor]] = {run: [], plain: []}
    for step in range(2):
        found = []
        for call in (run, plain):
            torch.manual_seed(step)
            given = [carried.detach() for carried in before[call]]  # the second step carries its states over
            outputs, states = call(x, None if not given else given[0] if len(given) == 1 else tuple(given))
            before[call] = leaves(states)
            loss_of(outputs, states).backward()
            found.append([outputs.detach(), *leaves(states), torch.rand(2)])
        exact = {"rtol": 0, "atol": 0} if backend == "aten" else {}
        torch.testing.assert_close(found[0], found[1], **exact)
        for own, other in zip(gradients(model), gradients(plain), strict=True):
            torch.testing.assert_close(own, other, **exact)
    assert not run.report.notes


def test_states_may_be_carried_with_their_gradients():
    x = torch.randn(5, 2, 4)
    model, plain = twins(nn.GRU, x)
    run = memopt.compile(model, backend="aten")
    for call in (run, plain):
        first, states = call(x)
        second, states = call(x, states)
        (first.square().sum() + loss_of(second, states)).backward()
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_evaluation_and_autocast_are_eagers(kind):
    x = torch.randn(5, 2, 4)
    model, plain = twins(kind, x, num_layers=2, dropout=0.5)
    run = memopt.compile(model.eval(), "10MB", backend="aten")
    plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(run(x), plain(x), rtol=0, atol=0)
    found = []
    for call in (run, plain):
        with torch.autocast("cpu", torch.bfloat16):
            outputs, states = call(x)
        loss_of(outputs, states).backward()
        found.append([outputs.detach(), *leaves(states)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=0.02, atol=0.02)
    assert not run.report.notes


def test_other_calls_than_the_modules_own_and_inputs_without_a_batch():
    torch.manual_seed(0)
    model = nn.GRU(4, 6, batch_first=True)

    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = model

        def forward(self, x):
            alone, last = self.rnn(x)
            weights = list(self.rnn.parameters())
            output, _ = torch.gru(x.unsqueeze(1), last.unsqueeze(1), weights, True, 1, 0.0, True, False, False)
            return alone + output.squeeze(1)

    x = torch.randn(5, 4)
    run = memopt.compile(Direct(), backend="aten", verify="full")
    assert torch.equal(run(x), Direct()(x)) and not run.report.notes


@pytest.mark.long
def test_lengths_are_planned_once_for_all_from_the_second_on():
    model, plain = twins(nn.LSTM, torch.randn(5, 2, 4))
    run = memopt.compile(model, "10MB", backend="inductor")
    for length in (5, 9, 7, 12):
        x = torch.randn(length, 2, 4)
        for call in (run, plain):
            loss_of(*call(x)).backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
    assert not any("planned each by itself" in note for note in run.report.notes)


def test_packed_sequences_run_as_they_are_beside_what_is_captured():
    class Packed(Tagger):
        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, enforce_sorted=False)
            padded, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed, torch.zeros(1, 2, 8))[0])
            return self.last(padded.tanh())

    torch.manual_seed(0)
    model = Packed(nn.GRU)
    model(torch.randn(5, 2, 4), torch.tensor([5, 3]))
    plain, run = copy.deepcopy(model), memopt.compile(model, "1MB", backend="aten")
    for lengths in ([5, 3], [2, 5]):
        x = torch.randn(5, 2, 4)
        for call in (run, plain):
            call(x, torch.tensor(lengths)).square().sum().backward()
        torch.testing.assert_close(gradients(model), gradients(plain), rtol=0, atol=0)


def test_what_is_differentiated_by_torch_func_runs_as_it_is():
    class Sensitive(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 6)

        def forward(self, x):
            return self.rnn(x)[0].sum() + torch.func.grad(lambda y: self.rnn(y)[0].sum())(x).square().sum()

    torch.manual_seed(0)
    model, x = Sensitive(), torch.randn(5, 2, 4)
    run, plain = memopt.compile(model, "10MB", backend="aten"), copy.deepcopy(model)
    for call in (run, plain):
        call(x).backward()
    torch.testing.assert_close(gradients(model), gradients(plain))
    assert "recurrent_calls" not in str(run.report.notes).replace("test_recurrent_calls", "")
