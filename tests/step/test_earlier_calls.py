"""What calls of a step hold whose backward has not run."""

import weakref

import pytest
import torch

from memopt.step import earlier_calls
from memopt.step.earlier_calls import (
    EarlierCalls,
    KnownCalls,
    Ran,
    arguments_beside,
    arguments_of,
    calls_in_words,
    made_by,
    without_made,
)


class Saved(Ran):
    """A call that has saved so many bytes."""

    def __init__(self, size: int) -> None:
        super().__init__((), {}, ())
        self.__dict__["size"] = size

    @property
    def saved(self) -> int:
        return self.size


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1, [], [], 0), ""),
        ((3, [], [], 0), "3 calls before the first backward hold theirs together"),
        ((1, [], [1000, 1000], 7), "calls of the budget's other models, whose backward has not run, hold 2.00 kB"),
        ((1, [1000], [5000], 1000), "an earlier call of this step, whose backward has not run, holds 2.00 kB: "),
        ((1, [1000, 3000], [], 0), "2 earlier calls of this step, whose backward has not run, hold 4.00 kB: "),
    ],
)
def test_what_other_calls_hold_is_said(given, words):
    calls, earlier, others, arguments = given
    said = calls_in_words(calls, [Saved(size) for size in earlier], [Saved(size) for size in others], arguments)
    assert said.startswith(words) and bool(said) == bool(words)


def test_arguments_are_counted_once_each_by_storage():
    x, y = torch.zeros(100), torch.zeros(10)
    own = arguments_of((x, x[:5]), {"more": [y]})
    assert sorted(own.values()) == [40, 400]
    earlier = Ran((), arguments_of((y, torch.zeros(3)), {}), ())
    assert arguments_beside([earlier, earlier], own) == 12


def test_what_is_known_of_a_script_is_believed_only_where_it_is_plausible():
    known = KnownCalls()
    assert known.get("Model", "1GB", "key") == (1, 0)
    known.put("Model", "1GB", "key", 4, 400)
    assert KnownCalls().get("Model", "1GB", "key") == (4, 400) and known.get("Model", "2GB", "key") == (1, 0)
    known.put("Model", "1GB", "key", 1 << 20, 400)
    assert KnownCalls().get("Model", "1GB", "key") == (1, 0)


def test_a_state_that_a_call_returns_to_the_next_one_is_counted_once():
    x, state = torch.zeros(5), torch.zeros(7)
    first = Ran((), arguments_of((torch.zeros(3),), {}), (), made=(weakref.ref(state.untyped_storage()),))
    own = arguments_of((x, state), {})
    assert without_made([first], own) == arguments_of((x,), {})
    assert arguments_beside([first], own) == 3 * 4 - 7 * 4
    second = Ran((), without_made([first], own), ())
    assert arguments_beside([first, second], {}) == 3 * 4 + 5 * 4


def test_an_output_that_is_gone_is_no_argument_of_a_later_call():
    state = torch.zeros(7)
    first = Ran((), {}, (), made=(weakref.ref(state.untyped_storage()),))
    del state
    assert made_by([first]) == set()


def test_one_call_more_than_is_known_is_planned_with_all_before_it(monkeypatch):
    """Where its sizes were new as well that was an IndexError."""
    monkeypatch.setattr(earlier_calls, "fingerprint", str)
    known = EarlierCalls()
    known.programs = [("first",), ("second",)]
    assert known.with_programs(["third"], 2, 2) == (["first", "second", "third"], 2)
    assert known.with_programs(["other"], 1, 2) == (["first", "other"], 1)
