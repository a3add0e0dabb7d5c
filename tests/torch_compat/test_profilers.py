"""Somebody is called before a profiler of torch's starts; marks are seen by that alone."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.memory.measure import Recording
from memopt.torch_compat.profilers import before_profilers, mark


@pytest.mark.parametrize("kind", ["autograd", "kineto"])
def test_a_profiler_is_announced_until_that_is_undone(kind):
    def profiled():
        if kind == "autograd":
            return torch.autograd.profiler.profile(use_kineto=True)
        return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    calls = []
    undo = before_profilers(lambda: calls.append(1))
    try:
        with profiled():
            torch.ones(2)
    finally:
        undo()
    assert calls
    known = len(calls)
    with profiled():
        torch.ones(2)
    assert len(calls) == known


def test_a_mark_is_no_operator_that_dispatch_modes_see():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Recording(torch.device("cpu")) as recording, Seen():
        mark("here")
    assert not seen and "here" in recording.marks
