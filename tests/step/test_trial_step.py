"""A step that is taken of compiled code: what it changes (nothing), and what is seen of it."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import memopt
from memopt.step import trial_step as taken_step
from memopt.step.trial_step import Short, TrialMemory, mutated, take_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch):
    """CUDA's figures where there is no device: what is allocated and reserved is what a test says."""

    class Cuda:
        allocated = reserved = before = retries = 0

    figures = Cuda()
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: figures.before)
    monkeypatch.setattr(taken_step, "allocated_after_gc", lambda device: torch.cuda.memory_allocated(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: figures.allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: figures.reserved)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_alloc_retries": figures.retries})
    return figures


class Counting(nn.Module):
    """Batch norm and dropout: a step moves a buffer and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x))).square().mean()


def captured(model):
    """The compiled graph of a model, its arguments and the positions of those it writes to."""
    seen = []

    def remember(session, lower, hooks, given):
        run, _ = lower()
        seen.append((run, list(given), mutated(hooks.captured)))
        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memopt.calls.tracing.lower_within", remember)
        memopt.compile(model, backend="aten", verify=False)(torch.randn(4, 8))
    return seen[0]


def test_nothing_of_the_model_changes(device):
    model = Counting()
    run, given, written = captured(model)
    start = {key: (value.clone(), value._version) for key, value in model.state_dict(keep_vars=True).items()}
    hooked = []
    for parameter in model.parameters():
        parameter.register_hook(hooked.append)
    random = torch.get_rng_state()
    device.allocated, device.reserved, device.before = 10, 20, 5
    assert len(written) == 3  # mean, variance, batches
    assert take_step(run, given, written, CPU) == TrialMemory(10, 20, 5)
    assert torch.equal(torch.get_rng_state(), random) and not hooked
    for key, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, start[key][0]) and value._version == start[key][1] and value.grad is None


def test_buffers_that_stay_and_blocks_that_are_handed_back_are_seen(device, monkeypatch):
    run, given, written = captured(Counting())
    before = iter([100, 100, 164, 164])  # twice before the first step, then before the second and in the end
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(before))
    device.allocated, device.reserved = 500, 600
    asked = []

    def stats(device):
        asked.append(device)
        return {"num_alloc_retries": len(asked) // 3}

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    assert take_step(run, given, written, CPU) == TrialMemory(500, 600, 164, kept_bytes=64, retries=1)


def test_a_step_that_is_held_to_the_limit_keeps_its_cache(device, monkeypatch):
    run, given, written = captured(Counting())
    emptied, left = [], []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    monkeypatch.setattr(taken_step, "lifted", lambda device: contextlib.nullcontext(left.append(1)))
    assert take_step(run, given, written, CPU, held=True) == TrialMemory(0, 0, 0)
    assert (len(emptied), len(left)) == (1, 0)  # at the end
    take_step(run, given, written, CPU)
    assert (len(emptied), len(left)) == (4, 1)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), KeyboardInterrupt()])
def test_a_step_that_fails_changes_nothing_either(device, error):
    model = Counting()
    run, given, written = captured(model)
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def fail(*args):
        run(*args)
        raise error

    random = torch.get_rng_state()
    short = isinstance(error, torch.OutOfMemoryError)
    with contextlib.nullcontext() if short else pytest.raises(KeyboardInterrupt):
        assert take_step(fail, given, written, CPU) == Short()
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict().items():
        assert torch.equal(value, start[key])


@pytest.mark.parametrize(
    ("message", "free", "expected"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 MiB. GPU 0 has", 2**30, Short(5 * 2**19 - 2**20)),
        ("CUDA out of memory. Tried to allocate 512 bytes.", 2**30, Short()),
        ("something else", 2**30, Short()),
        ("CUDA out of memory. Tried to allocate 2.50 MiB.", 2**20 - 1, Short(others=True)),
    ],
    ids=["too much", "as much as there is", "not said", "others"],
)
def test_what_a_step_lacked_is_known_from_what_it_asked_for(monkeypatch, message, free, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**20)
    monkeypatch.setattr(taken_step, "held_bytes", lambda device: 2**22)
    assert taken_step.lacked(torch.OutOfMemoryError(message), torch.device("cuda", 0), True) == expected


def test_gradients_that_are_dropped_within_backward_are_not_kept_by_a_step_either():
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    given = [layer.weight, layer.bias, x]

    def run(weight, bias, x):
        return [torch.nn.functional.linear(x, weight, bias)]

    output, weight, bias = taken_step.results_of(run, given, ())
    found = taken_step.results_of(run, given, (), [0])
    assert found[1] is None and torch.equal(found[2], bias) and torch.equal(found[0], output)
    assert weight is not None and layer.weight.grad is None


class _Seen(torch.autograd.Function):
    """Passes values on; its backward tells which gradients it was given."""

    @staticmethod
    def forward(ctx, seen, *values):
        ctx.seen = seen
        ctx.set_materialize_grads(False)
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx, *gradients):
        ctx.seen.append([None if gradient is None else gradient.shape for gradient in gradients])
        return None, *gradients


def test_backward_begins_where_that_of_a_loop_does_and_no_other_tangent_is_held_to_its_end():
    weight, seen = nn.Parameter(torch.randn(3, 4)), []

    def with_loss(weight):
        return _Seen.apply(seen, weight.square().mean(), weight.sin())

    def without(weight):
        return _Seen.apply(seen, weight.square(), weight.sin())

    taken_step.results_of(with_loss, [weight], ())
    assert seen.pop() == [torch.Size([]), None]
    taken_step.results_of(without, [weight], ())
    assert seen.pop() == [torch.Size([3, 4])] * 2
