"""A step that is tried captured: what is taken, what is left, and what either changes (nothing)."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn

import memopt
from memopt.backends.inductor import missing_compiler
from memopt.calls.sessions import Sessions
from memopt.compilation.session import Session
from memopt.cuda_graphs import trial
from memopt.cuda_graphs.pool import GraphPool
from memopt.cuda_graphs.steered_code import SteeredCode
from memopt.step import budget_trial, trial_steps
from memopt.step.trial_step import TrialMemory, mutated
from tests.cuda_graphs.tape import Tape
from tests.training.steps import gradients

CPU = torch.device("cpu")
# A limit, and what of it a CUDA graph may take.
_HELD = 10**9
_BATCH = 32 * 16 * 4  # of `made`: the next one comes while it is there
_ALLOWED = _HELD - trial._BESIDE - _BATCH
pytestmark = pytest.mark.skipif(missing_compiler(CPU) is not None, reason="no C++ compiler")


class Net(nn.Module):
    """Batch norms, dropout and a weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 16)

    def forward(self, x, y=None):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = self.last(torch.tanh(self.first(x)))
        return (x if y is None else x - y).square().mean()


@pytest.fixture
def tape(monkeypatch):
    """A pool on CPU, whose steps are measured as if there were a device; captured ones are taken however fast."""
    torch._dynamo.reset()
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda device: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for module in (budget_trial, trial):
        monkeypatch.setattr(module, "held_bytes", lambda device: _HELD)
    for module in (trial_steps, trial):
        monkeypatch.setattr(module, "allocated_after_gc", lambda device: 0)
    monkeypatch.setattr(budget_trial, "measurable", lambda session, hooks: hooks.captured and mutated(hooks.captured))
    monkeypatch.setattr(trial_steps, "take_step", lambda *args, held=False, **_: TrialMemory(1, 1, 0))
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: None)
    monkeypatch.setattr(trial, "lifted", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(trial, "_WORTH", 1e9)
    monkeypatch.setattr(trial, "_WORTH_A_PLAN", 1e9)
    monkeypatch.setattr(trial, "_INSTEAD_OF_A_PLAN", 1e9)
    found = Tape()
    pool = GraphPool(found)

    def here(sessions):
        sessions.graph_pool = pool
        return pool

    monkeypatch.setattr(Sessions, "_graph_pool_here", here)
    return found


def made():
    torch.manual_seed(0)
    return Net(), [torch.randn(32, 16) for _ in range(4)]


def trained(run, model, inputs, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number, x in enumerate(inputs):
        torch.manual_seed(number)
        loss = run(x, **options)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        if number < len(inputs) - 1:
            optimizer.zero_grad()
    return losses, gradients(model), [value.clone() for value in model.state_dict().values()]


def test_captured_steps_train_as_the_code_does(tape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 123_456_789)
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor", passes=None)
    expected = trained(run, model, inputs)
    assert run.report.measured_peak_bytes == 123_456_789
    assert tape.captures == 2 and tape.replays > 8
    torch._dynamo.reset()
    tape.failing = [True] * 9
    other, inputs = made()
    run = memopt.compile(other, "1GB", backend="inductor")
    torch.testing.assert_close(trained(run, other, inputs), expected, rtol=0, atol=0)
    assert tape.captures == 2 and not any("CUDA graphs" in note for note in run.report.notes)


def both(tape, train):
    """What comes of training captured, and of training as the code does it."""
    found = []
    for failing in (False, True):
        torch._dynamo.reset()
        tape.failing = [failing] * 99
        model, inputs = made()
        run = memopt.compile(model, "1GB", backend="inductor")
        found.append((train(run, model, inputs), gradients(model), list(model.state_dict().values())))
    return found


def assert_same(found, **tolerances):
    torch.testing.assert_close(found[0], found[1], **{"rtol": 0, "atol": 0, **tolerances})


def test_the_code_tells_its_lines_while_it_is_captured(tape, monkeypatch):
    told = []
    monkeypatch.setattr(SteeredCode, "before", lambda self, line: told.append((tape.capturing, line)))
    model, inputs = made()
    trained(memopt.compile(model, "1GB", backend="inductor"), model, inputs)
    lines = [line for capturing, line in told if capturing]
    assert lines[0] == 0 and len(lines) > 4 and not tape.capturing
    assert told and len(set(lines)) == max(lines) + 1  # forward's, and backward's after them


def test_calls_of_other_kinds_between_steps(tape):
    def train(run, model, inputs):
        losses = []
        for number, x in enumerate([*inputs, *inputs]):
            torch.manual_seed(number)
            loss = run(x)
            loss.backward()
            with torch.no_grad():
                run.eval()
                losses.append(run(x))
                run.train()
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        return losses

    assert_same(both(tape, train))
    assert tape.captures == 2 * 3, "in its trial, and twice between evaluations that come after each step"


def test_gradients_that_add_up(tape):
    def train(run, model, inputs):
        for number, x in enumerate(inputs):
            torch.manual_seed(number)
            run(x).backward()

    assert_same(both(tape, train))


@pytest.mark.long
def test_batches_of_two_sizes_in_turn(tape):
    def train(run, model, inputs):
        losses = []
        for number in range(24):
            torch.manual_seed(number)
            loss = run(inputs[number % 4][: 32 - 8 * (number % 2)])
            losses.append(loss.detach())
            loss.backward()
        return losses

    assert_same(both(tape, train))


@pytest.mark.long
def test_two_losses_at_a_time_and_one_that_is_dropped(tape):
    def train(run, model, inputs):
        for number in range(3):
            torch.manual_seed(number)
            first, second = run(inputs[0]), run(inputs[1], y=inputs[2])
            (first + 2 * second).backward()
            run(inputs[3])
        return first, second

    assert_same(both(tape, train))


def test_results_that_differ_are_not_taken(tape, monkeypatch):
    capture = Tape.capture

    def wrong(self, run, arguments):
        replay, results = capture(self, run, arguments)

        def other():
            replay()
            results[0].mul_(1.001)

        return other, results

    monkeypatch.setattr(Tape, "capture", wrong)
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    losses, *_ = trained(run, model, inputs)
    monkeypatch.undo()
    torch._dynamo.reset()
    other, inputs = made()
    torch.testing.assert_close(losses, trained(memopt.compile(other, backend="inductor"), other, inputs)[0])
    assert not any("CUDA graphs" in note for note in run.report.notes) and tape.releases == 1


def test_a_step_that_is_no_faster_captured_is_not(tape, monkeypatch):
    grown = []  # the cache in one piece, as the step that keeps the budget was seen to need it
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: grown.append((tape.releases, size)))
    monkeypatch.setattr(trial, "_WORTH", 0.0)
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    assert not any("CUDA graphs" in note for note in run.report.notes) and tape.releases == 1
    assert grown == [(0, 1), (0, 1), (1, 1)] and tape.replays > 12  # more steps, as others may use the device
    assert "the step is not captured: it is no faster so" in run.report.notes


def test_a_step_whose_device_does_not_wait_is_not_tried(tape, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(trial, "_WAITS", 0.6)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: next(clock))  # as much for the device as for its host
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    assert not tape.captures and not any("CUDA graphs" in note for note in run.report.notes)


@pytest.fixture
def asked(monkeypatch):
    """By how many bytes less steps are planned again, what a plan leaves of its budget aside."""
    found, tighten = [], Session.tighten
    monkeypatch.setattr(Session, "tighten", lambda self, size: found.append(size) or tighten(self, size))
    monkeypatch.setattr(Session, "unused", lambda self: 0)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["fits then", "does not"])
def test_a_cuda_graph_that_lacks_memory_is_planned_for_less(tape, monkeypatch, asked, again):
    reserved = iter([_ALLOWED + 80_000, 0])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved, 0))
    tape.failing = [again] * 4
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    (size,) = asked
    assert 90_000 <= size < 100_000  # with what is copied in
    assert any("CUDA graphs" in note for note in run.report.notes) is not again


@pytest.mark.parametrize("waits", [False, True])
def test_a_cuda_graph_is_never_tried_beyond_the_limit(tape, monkeypatch, asked, waits):
    """It would have been expected to fit, or saves nothing that another plan would be worth."""
    reserved = iter([0] if waits else [_ALLOWED + 80_000])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved, 0))
    monkeypatch.setattr(trial, "_HOST_BOUND", 0.8 if waits else 1.1)
    monkeypatch.setattr(trial, "lifted", None)
    tape.failing = [True] * 4
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    assert not asked and "the step is not captured: memory is short" in run.report.notes


def test_a_cuda_graph_leaves_room_for_what_is_allocated_beside_it(tape, monkeypatch, asked):
    """It has nothing to hand back: where it takes the last bytes, the caller's own step would run out of memory."""
    reserved = iter([0, _HELD - 1, 0, _ALLOWED])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved, 0))
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    lacking = trial._BESIDE + _BATCH - 1
    assert asked == [lacking + lacking // 8]
    assert any("CUDA graphs" in note for note in run.report.notes)


def test_a_cuda_graph_leaves_room_for_the_loss_and_the_optimizer(tape, monkeypatch, asked):
    reserved = iter([0, _ALLOWED, 0, _ALLOWED - 80_000])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved, 0))
    monkeypatch.setattr(Session, "beside_graphs", _BATCH + 80_000)
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    assert asked == [90_000]
    assert any("CUDA graphs" in note for note in run.report.notes)


@pytest.mark.parametrize("lacking", [0, 80_000], ids=["fits", "fits with less"])
def test_a_step_whose_blocks_lie_badly_is_captured_before_it_is_planned_for_less(tape, monkeypatch, asked, lacking):
    def taken(*args, held=False, **_):
        return TrialMemory(1, 2 * 10**9, 0, retries=3 * held)

    monkeypatch.setattr(trial_steps, "take_step", taken)
    monkeypatch.setattr(torch, "empty", functools.partial(_little, torch.empty))
    # Without the limit the step as it is holds more; a CUDA graph lacks some at first, or nothing.
    reserved = iter([2 * 10**9, _ALLOWED + lacking] if lacking else [])
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: next(reserved, 0))
    model, inputs = made()
    run = memopt.compile(model, "1GB", backend="inductor")
    trained(run, model, inputs)
    assert asked == ([90_000] if lacking else [])
    assert any("CUDA graphs, which takes less memory" in note for note in run.report.notes), run.report.notes


def _little(empty, *args, **options):
    return empty(0 if args and isinstance(args[0], int) and args[0] > 10**8 else args[0], *args[1:], **options)
