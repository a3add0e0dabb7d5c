"""A model's own call and what is compiled of it, side by side."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from memopt.calls.before_call import BeforeCall, set_random_states
from memopt.calls.compared import Outcome, difference_of, other_random, unlike
from memopt.calls.outcome import Between, outcome_of
from memopt.torch_compat import pytree


class Sides:
    """The model's call and others, each begun from the same state.

    Attributes:
        expected: what the model's own call does.
        draws: whether it draws random numbers with torch.
    """

    def __init__(self, before: BeforeCall, draws_alike: bool) -> None:
        """Run the model.

        Args:
            before: the state that calls begin with.
            draws_alike: whether the engine draws the random numbers that the model draws.
        """
        self._before, self._draws_alike = before, draws_alike
        self.expected = self.run(self._model)
        states = before.random[:-1]
        self.draws = other_random(states, self.expected.random[: len(states)])

    @functools.cached_property
    def _reference(self) -> Outcome | None:
        """The call in float64; None where it has none, or draws other random numbers."""
        self._before.restore()
        return None if self.draws else _reference(self._before)

    def run(self, call: Callable[[], Any], between: Between | None = None) -> Outcome:
        """What a call does."""
        self._before.restore()
        return outcome_of(self._before, call, between)

    def difference(self, found: Outcome, *, alike: bool) -> str | None:
        """In what a call differs from the model's, in one line; what no two calls of the model do alike is left out.

        Args:
            found: what it did.
            alike: whether it draws the same random numbers for certain.
        """
        expected, found = _as_far(found, self.expected), _as_far(self.expected, found)
        expected = _written_once(expected, found)
        difference = difference_of(expected, found, self._reference)
        if difference is None:
            return None
        self._before.restore()
        if self.draws and not (alike or self._draws_alike):
            torch.manual_seed(torch.initial_seed() ^ 1)
        again = _as_far(expected, outcome_of(self._before, self._model))
        return difference_of(expected, found, self._reference, but=unlike(expected, again))

    def difference_with(self, call: Callable[[], Any], between: Between) -> str | None:
        """In what gradients differ from the model's where a loop writes between forward and backward.

        A call that refuses such writes differs in nothing, and there is nothing to compare where the model's backward
        does; nor where random numbers are others.
        """
        if self.draws and not self._draws_alike:
            return None
        try:
            expected = self.run(self._model, between)
            found = self.run(call, between)
        except RuntimeError:
            return None
        expected, found = _as_far(found, expected), _as_far(expected, found)
        difference = difference_of(expected, found, None)
        if difference is None:
            return None
        return difference_of(expected, found, None, but=unlike(expected, self.run(self._model, between)))

    def _model(self) -> Any:
        return self._before.model(*self._before.args, **self._before.kwargs)


def _as_far(other: Outcome, outcome: Outcome) -> Outcome:
    """What a call did, without gradients that of the other cannot be had.

    The model may have written to what those of all outputs together need, or have checkpoints that give none to
    `torch.autograd.grad`.
    """
    kinds = {_kind(name) for name in other.values}
    values = {name: value for name, value in outcome.values.items() if _kind(name) in ("", *kinds)}
    return dataclasses.replace(outcome, values=values)


def _kind(name: str) -> str:
    """How a gradient was had; empty for what is none."""
    if not name.startswith("gradient of "):
        return ""
    return "backward" if name.endswith("after backward()") else "grad"


def _written_once(expected: Outcome, found: Outcome) -> Outcome:
    """What the model did, without what its backward writes to and the other call's does not.

    Eager runs the user's checkpoints once more in backward, which a graph does not: a note says so of their buffers.
    """
    values = dict(expected.values)
    for name in expected.values:
        left = name.replace(" after backward", " after the call")
        if left == name or left not in values or not {name, left} <= found.values.keys():
            continue
        then = [outcome.values[key] for outcome in (expected, found) for key in (left, name)]
        tensors = all(isinstance(value, torch.Tensor) for value in then)
        if tensors and not torch.equal(then[0], then[1]) and torch.equal(then[2], then[3]):
            values[name] = then[3]
    return dataclasses.replace(expected, values=values)


def _reference(before: BeforeCall) -> Outcome | None:
    """The model's call in float64; None where it has none."""

    def wide(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        wider = value.double() if value.is_floating_point() else value
        return wider.detach().clone().requires_grad_(value.requires_grad)

    try:
        args, kwargs = pytree.tree_map(wide, (tuple(before.args), dict(before.kwargs)))
        copied = BeforeCall(copy.deepcopy(before.model).double(), args, kwargs)
        return outcome_of(copied, lambda: copied.model(*args, **kwargs))
    except Exception:  # a model that asks for a dtype has no such call: its numbers are compared as they are
        return None
    finally:
        set_random_states(before.random)
