"""Memory alone is recorded: no region is, whose end torch may write to freed memory; who starts a profiler is seen."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memopt.memory.allocator_events import Recording
from memopt.torch_compat.profilers import before_profilers


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
        recording.mark("here")
        kept = torch.UntypedStorage(100)
        recording.mark("there")
    assert not seen and recording.changes[0][1] == kept.nbytes() and len(recording.changes) == 1
    assert recording.marks["here"] < recording.changes[0][0] < recording.marks["there"]


@pytest.mark.parametrize("region", ["operator", "user's"])
def test_regions_that_outlast_a_recording_write_to_nobodys_memory(region):
    """Torch writes where a region ended that began in a profile which is gone, once another profile is active."""

    def between():
        recordings.pop().end()
        fill[:] = [torch.zeros(count) for count in range(8000, 200000, 1000)]  # in memory that torch has given back
        recordings.append(Recording(torch.device("cpu")))
        recordings[-1].begin()

    def step():
        if region == "user's":
            with torch.profiler.record_function("a step"):
                between()
        else:
            with torch._C._profiler._RecordFunctionFast("an operator"):
                between()

    gc.disable()
    try:
        for _ in range(4):
            fill: list[torch.Tensor] = []
            recordings = [Recording(torch.device("cpu"))]
            recordings[0].begin()
            step()
            recordings.pop().end()
            assert not any(each.view(torch.int32).count_nonzero() for each in fill)
    finally:
        gc.enable()
