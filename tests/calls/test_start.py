"""What a call may have changed is set back before it begins anew."""

import collections

import pytest
import torch
from torch import nn

from memopt.calls.start import CallStart


class Counting(nn.Module):
    """A buffer and a number that forward counts in, and dropout."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.count = 0

    def forward(self, x):
        self.count += 1
        self.seen += 1
        return torch.dropout(x, 0.5, train=True)


def test_a_restored_call_draws_the_same_numbers_and_counts_once():
    model, x = Counting(), torch.ones(64)
    start = CallStart(model, state=True)
    first = model(x)
    start.restore()
    assert model.count == 0 and model.seen == 0
    assert torch.equal(model(x), first)
    assert model.count == 1 and model.seen == 1


def test_without_state_only_the_random_numbers_are_restored():
    model, x = Counting(), torch.ones(64)
    start = CallStart(model, state=False)
    first = model(x)
    start.restore()
    assert model.count == 1 and model.seen == 1
    assert torch.equal(model(x), first)


def test_a_buffer_that_was_replaced_is_the_same_object_after():
    model = Counting()
    buffer = model.seen
    start = CallStart(model, state=True)
    model.seen = torch.ones(())
    start.restore()
    assert model.seen is buffer


class Writing(nn.Module):
    """Writes to whatever it can."""

    def __init__(self):
        super().__init__()
        self.weight, self.plain, self.seen = nn.Parameter(torch.ones(3)), torch.ones(2), []
        self.register_buffer("mean", torch.zeros(3))

    @torch.no_grad()
    def forward(self, x, more):
        x.T.add_(1)
        more["y"].mul_(2)
        self.weight.zero_()
        self.plain += 1
        self.plain = self.plain + 1
        self.seen.append(3)
        self.new = 4
        # Without a new version of the mean.
        torch.batch_norm(x, None, None, self.mean, torch.ones(3), True, 0.1, 1e-5, False)


def test_what_a_call_writes_to_is_set_back():
    model, x, y = Writing(), torch.randn(6, 3), torch.randn(4, 3)
    before, plain = [value.clone() for value in (x, y, model.weight)], model.plain
    start = CallStart(model, ((x, {"y": y[1:].T}), {}), state=True)
    model(x, {"y": y[1:].T})
    assert start.restore() == ""
    for value, known in zip((x, y, model.weight), before, strict=True):
        assert torch.equal(value, known)
    assert model.plain is plain and torch.equal(plain, torch.ones(2)) and model.seen == [] and not hasattr(model, "new")
    assert torch.equal(model.mean, torch.zeros(3))


def test_a_tensor_that_shows_an_element_many_times_is_set_back():
    x = torch.arange(3.0)
    start = CallStart(nn.Identity(), (x.expand(5, 3),), state=True)
    x.zero_()
    assert start.restore() == ""
    assert torch.equal(x, torch.arange(3.0))


def test_of_large_memory_it_is_known_whether_it_was_written_to():
    model, x = Counting(), torch.zeros(2**19)
    start = CallStart(model, (x,), state=True)
    x[3:].exp_()
    assert start.restore() == "input 0"
    start = CallStart(model, (x,), state=False)
    model.seen += 1
    assert start.restore() == "buffer 'seen'"


@pytest.mark.parametrize("large", [False, True])
def test_all_buffers_are_set_back_where_that_is_asked_for(large):
    model = Counting()
    model.seen = torch.zeros(2**19)
    start = CallStart(model, (), state=True, buffers=large)
    model.seen += 1
    assert start.restore() == ("" if large else "buffer 'seen'")
    assert torch.equal(model.seen, torch.zeros(2**19)) is large


class Records(nn.Module):
    """Registers hooks at its first call, as transformers' models do that record hidden states."""

    def __init__(self):
        super().__init__()
        self.first, self.lazy, self.seen = nn.Linear(4, 4), nn.LazyLinear(2), []

    def forward(self, x):
        if not getattr(self, "_installed", False):
            self.first.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.first.register_full_backward_hook(lambda module, before, after: None)
            self._installed = True
        self.seen.clear()
        return self.lazy(self.first(x)), len(self.seen)


def test_hooks_that_a_call_registers_are_set_back_with_their_flag():
    model, x = Records(), torch.ones(3, 4)
    start = CallStart(model, state=True)
    assert model(x)[1] == 1
    start.restore()
    assert not hasattr(model, "_installed") and not model.first._forward_hooks and not model.first._backward_hooks
    assert model.first._is_full_backward_hook is None
    output, seen = model(x)
    assert seen == 1 and output.shape == (3, 2)


@pytest.mark.parametrize("kind", [list, set, collections.deque, dict, collections.Counter, collections.OrderedDict])
def test_containers_hold_what_they_held(kind):
    model, contents = nn.Identity(), [("a", 1), ("b", 2)]
    model.held = kind(dict(contents)) if issubclass(kind, dict) else kind(contents)
    start, before = CallStart(model, state=True), model.held.copy()
    model.held.update({"a": 5, "c": 6}) if kind in (dict, set) or issubclass(kind, dict) else model.held.append(7)
    assert model.held != before
    start.restore()
    assert model.held == before and type(model.held) is kind


def test_trained_parameters_are_copied_where_calls_were_seen_to_write_to_them():
    class Scaling(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        @torch.no_grad()
        def forward(self, x):
            self.scale.mul_(2)
            return x

    model = Scaling()
    start = CallStart(model, state=True)
    model(torch.ones(3))
    written = start.written()
    later = CallStart(model, state=True, written=written)
    model(torch.ones(3))
    assert later.restore() == "" and model.scale.eq(2).all()
    with torch.no_grad():
        model.weight.add_(1)
    assert later.restore() == "parameter 'weight'"
