"""A window between a call's end and its backward: what it knows of the call's outputs, and what it says."""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch

from memopt.step.open_window import Ended, OpenWindow


def opened(outputs: list[torch.Tensor], whole: Any = None) -> OpenWindow:
    """A window of a call with these outputs, on no allocator."""
    call = Ended("graph", torch.device("cpu"), 0, list, whole=whole)
    made = [output.untyped_storage() for output in outputs]
    window: Any = None
    return OpenWindow(window, call, outputs, made, lambda: None, 0)


def test_what_the_whole_step_has_held_is_said_once_and_only_where_it_is_known() -> None:
    told: list[Any] = []
    window = opened([], told.append)
    unknown: Any = types.SimpleNamespace(whole=None)
    known: Any = types.SimpleNamespace(whole=12)
    for held in (unknown, known, known):
        window.report_whole(held)
    assert told == [known]
    opened([]).report_whole(known)


def test_a_backward_may_come_as_long_as_a_hook_of_the_graph_lives() -> None:
    window, hook = opened([]), lambda: None
    assert not window.awaited
    window.hooks.append(weakref.ref(hook))
    assert window.awaited
    del hook
    assert not window.awaited


def test_gradients_of_outputs_that_stay_are_counted_until_they_are_made() -> None:
    output = torch.ones(6, requires_grad=True) * 2
    output.retain_grad()
    window = opened([output, torch.ones(5)])
    assert window.retained() == output.nbytes
    output.sum().backward()
    assert window.retained() == 0


def test_memory_of_outputs_is_known_whose_tensors_are_gone() -> None:
    stays, gone = torch.ones(4), torch.ones(8)
    window, saved = opened([stays, gone]), gone.untyped_storage()
    del gone
    assert [size for _, size in window.without_tensors()] == [saved.nbytes()]
    del saved
    assert window.without_tensors() == []


def test_of_several_backwards_the_one_counts_beside_which_the_loop_holds_most() -> None:
    window = opened([])
    window.another = [(0, 10), (0, 30)]  # gradients that it begins with, and those that parameters have then
    seen: Any = types.SimpleNamespace(again=(50, 60))
    assert window.more_again(seen) == 40
    window.gradients = 5
    assert window.more_again(seen) == 45
    unseen: Any = types.SimpleNamespace(again=())  # as on a GPU
    assert window.more_again(unseen) == 0
    window.another = []
    assert window.more_again(unseen) == 0, "the graph was kept for a backward that has not come"
