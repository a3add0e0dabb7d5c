"""What is done before the lines of a step's code, and how long blocks are steered."""

import contextlib
import logging

import pytest

from memopt.cuda_graphs import steered_code as module
from memopt.cuda_graphs.steered_code import SteeredCode
from memopt.solve.steering import Misplaced


class Led:
    """Notes what it is asked for; lines from `astray` on lie elsewhere."""

    def __init__(self, placement, memory):
        self.done, self.astray = placement, memory

    def begin(self):
        self.done.append("begin")

    def before(self, line):
        if line >= self.astray:
            raise Misplaced("elsewhere")
        self.done.append(line)

    def end(self):
        self.done.append("end")


@pytest.fixture
def steered(monkeypatch):
    monkeypatch.setattr(module, "Steering", Led)
    monkeypatch.setattr(module, "own_segment", contextlib.nullcontext)
    made = SteeredCode()
    made.memory = 100

    def forward(args):
        made.before(1)
        return [sum(args)]

    def backward(args):
        made.before(2)
        return list(args)

    made.forward, made.backward = forward, backward
    return made


def test_lines_are_told_before_they_run_and_before_arguments_are_taken(steered):
    told = []
    steered.watch_lines(told.append)
    assert steered.forward_by_lines([1, 2], lambda args: told.append("taken") or args) == [3]
    assert told == [0, "taken", 1]
    steered.watch_lines(None)
    assert steered.backward([4]) == [4] and told == [0, "taken", 1]


def test_without_a_placement_nothing_is_led(steered):
    told = []
    steered.watch_lines(told.append)
    assert steered.steered_forward([1], list) == [1] and steered.steered_backward([5]) == [5]
    assert told == []  # what was done before lines is let go of


def test_blocks_are_led_from_forward_to_the_end_of_backward(steered):
    steered.placement = done = []
    assert steered.steered_forward([1, 2], list) == [3] and done == ["begin", 0, 1]
    assert steered.steered_backward([5]) == [5] and done == ["begin", 0, 1, 2, "end"]


def test_backward_that_fails_holds_nothing(steered):
    steered.placement = done = []
    steered.steered_forward([1], list)
    steered.backward = lambda args: 1 / 0
    with pytest.raises(ZeroDivisionError):
        steered.steered_backward([])
    assert done[-1] == "end"
    steered.before(3)
    assert done[-1] == "end"


def test_a_block_that_lies_elsewhere_ends_the_leading_and_not_the_step(steered, caplog):
    steered.placement, steered.memory = (done := []), 1
    with caplog.at_level(logging.INFO, logger="memopt"):
        assert steered.steered_forward([1, 2], list) == [3] and steered.steered_backward([7]) == [7]
    assert done == ["begin", 0, "end"] and "not steered any further: elsewhere" in caplog.text
