"""What a model's code reaches is set back where a call begins anew, or was gone through on fake tensors first."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import memopt
from memopt.memory.object_state import ObjectState, copied_iterator

GENERATOR, COUNTS, TOTAL = torch.Generator(), [0], 0


class Holder:
    def __init__(self, value=0) -> None:
        self.value, self.inner = value, types.SimpleNamespace(values=[value])


def _drawn_outside(x):
    return torch.rand(x.shape[-1], generator=GENERATOR)


class Model(nn.Module):
    """Does something that cannot be repeated, between graphs or before the first one."""

    def __init__(self, state, act, place) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.state, self.act, self.place = state, act, place

    @torch.compiler.disable
    def _apart(self, x):
        return x * self.act(self.state, x)

    def forward(self, x):
        x = self._apart(x) if self.place == "before" else self.first(x)
        return self.last(self._apart(x) if self.place == "between" else torch.tanh(x))


def _count(holder, x):
    holder.value += 1
    holder.inner.values.append(holder.value)
    return holder.value + len(holder.inner.values)


def _count_outside(_, x):
    global TOTAL
    TOTAL += 1
    COUNTS[0] += 1
    return TOTAL + COUNTS[0]


def _enclosed():
    number, seen = 0, []

    def act(_, x):
        nonlocal number
        number += 1
        seen.append(number)
        return number + len(seen)

    return act


KINDS = {
    "an object": (lambda: Holder(1), lambda: _count),
    "a list of objects": (lambda: [Holder(2)], lambda: lambda held, x: _count(held[0], x)),
    "torch.Generator": (lambda: torch.Generator(), lambda: lambda g, x: torch.rand(8, generator=g)),
    "random.Random": (lambda: random.Random(1), lambda: lambda r, x: r.random()),
    "a NumPy generator": (lambda: np.random.default_rng(1), lambda: lambda r, x: float(r.random())),
    "NumPy's RandomState": (lambda: np.random.RandomState(1), lambda: lambda r, x: float(r.random_sample())),
    "an iterator": (lambda: itertools.cycle([1.0, 2.0, 3.0]), lambda: lambda i, x: next(i)),
    "globals": (lambda: None, lambda: _count_outside),
    "a variable of a function": (lambda: None, _enclosed),
    "what a function reads": (lambda: None, lambda: lambda _, x: _drawn_outside(x)),
}


def _calls(make, kind, place):
    global TOTAL
    GENERATOR.manual_seed(0)
    COUNTS[0] = TOTAL = 0
    state, act = KINDS[kind]
    torch.manual_seed(0)
    run = make(Model(state(), act(), place))
    return [run(torch.full((4, 8), 1.0 + number)).detach() for number in range(3)]


@pytest.mark.quick("before-an object", "between-random.Random", "before-torch.Generator")
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["before", "between"])
def test_what_cannot_be_repeated_is_done_once_a_call(kind, place) -> None:
    found = _calls(lambda model: memopt.compile(model, backend="aten"), kind, place)
    torch.testing.assert_close(found, _calls(lambda model: model, kind, place))


class Held(nn.Module):
    def __init__(self, **values) -> None:
        super().__init__()
        vars(self).update(values)


def test_objects_and_their_containers_hold_what_they_held() -> None:
    holder, queue = Holder(1), collections.deque([1, 2], maxlen=2)
    model = Held(holder=holder, nested={"a": [queue]})
    before = ObjectState(model)
    values = holder.inner.values
    holder.value, holder.inner.values, holder.new = 5, [], 1
    values.append(7)
    queue.append(3)
    model.nested["a"].append(4)
    assert before.restore() == ""
    assert vars(holder).keys() == {"value", "inner"}
    assert (holder.value, holder.inner.values, list(queue)) == (1, [1], [1, 2])
    assert holder.inner.values is values
    assert model.nested == {"a": [queue]}


def test_hooks_are_looked_into() -> None:
    seen = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(functools.partial(lambda kept, *_: kept.append(1), seen))
    before = ObjectState(model)
    model(torch.ones(1, 2))
    assert seen == [1]
    before.restore()
    assert seen == []


def test_a_tensor_that_an_object_holds_is_named() -> None:
    held = torch.ones(2)
    assert ObjectState(Held(holder=Holder(held), plain=torch.ones(3))).tensors == [held]


def test_a_generator_that_was_advanced_is_told() -> None:
    model = Held(numbers=(number for number in range(9)))
    before = ObjectState(model)
    assert before.restore() == ""
    next(model.numbers)
    assert before.restore() == "numbers"


def test_an_iterator_that_was_not_advanced_stays_the_same_object() -> None:
    numbers = iter([1, 2, 3])
    model = Held(numbers=numbers)
    next(numbers)
    before = ObjectState(model)
    before.restore()
    assert model.numbers is numbers
    next(numbers)
    before.restore()
    assert list(model.numbers) == [2, 3]


class Deprecated:
    """Copied with warnings, as an iterator of `itertools` is by Python 3.12."""

    def __init__(self, at):
        self.at = at

    def __iter__(self):
        return self

    def __next__(self):
        if self.at == 4:
            raise StopIteration
        self.at += 1
        return self.at

    def __reduce__(self):
        warnings.warn("copies will be removed", DeprecationWarning, stacklevel=2)
        return Deprecated, (0,), self.at

    def __setstate__(self, at):
        warnings.warn("copies will be removed", DeprecationWarning, stacklevel=2)
        self.at = at


@pytest.mark.parametrize(
    "make",
    [
        lambda: Deprecated(0),
        lambda: iter([1, 2, 3, 4]),
        lambda: iter((1, 2, 3, 4)),
        lambda: iter(range(4)),
        lambda: itertools.islice(itertools.count(5), 9),
        lambda: itertools.islice(itertools.cycle("abc"), 9),
        lambda: zip("abcd", range(9), strict=False),
        lambda: enumerate("abcd"),
    ],
)
def test_a_copied_iterator_goes_on_from_the_same_place(make) -> None:
    known = list(make())
    for taken in range(4):
        iterator = make()
        for _ in range(taken):
            next(iterator)
        copied = copied_iterator(iterator)
        assert list(copied) == known[taken:]
        assert list(iterator) == known[taken:]


def test_what_other_threads_may_write_to_is_left_alone() -> None:
    import queue

    waiting = queue.Queue()
    model = Held(waiting=waiting)
    before = ObjectState(model)
    waiting.put(1)
    before.restore()
    assert waiting.get_nowait() == 1
