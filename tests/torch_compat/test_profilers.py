"""Who starts a profiler of torch's is told to somebody first."""

from __future__ import annotations

import pytest
import torch

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
