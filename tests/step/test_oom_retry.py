"""Steps that lack memory which other processes hold for a moment."""

from __future__ import annotations

import pytest
import torch

from memopt.step import oom_retry
from memopt.step.trial_step import Short, TrialMemory


@pytest.mark.parametrize(
    ("results", "expected", "calls"),
    [
        ([Short(5)], Short(5), 1),
        ([Short(others=True), TrialMemory(1, 2, 3)], TrialMemory(1, 2, 3), 2),
        ([Short(others=True)] * 9, Short(others=True), 3),
    ],
    ids=["its own", "others' at first", "others' always"],
)
def test_a_step_is_taken_again_where_others_held_what_it_lacked(monkeypatch, results, expected, calls):
    left = list(results)
    monkeypatch.setattr(oom_retry, "is_short", lambda device, allowed: False)  # given back by the time of the look
    assert oom_retry.patiently(lambda: left.pop(0), torch.device("cuda", 0), 100) == expected
    assert len(results) - len(left) == calls


@pytest.mark.parametrize(
    ("free", "expected", "waits"),
    [([100], False, 0), ([10, 10, 60], True, 2), ([10] * 100, False, 40)],
    ids=["not short", "given back", "kept"],
)
def test_memory_that_others_hold_is_waited_for(monkeypatch, free, expected, waits):
    clock, left = [0.0], list(free)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (left.pop(0), 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 40)
    monkeypatch.setattr(oom_retry.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(oom_retry.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    assert oom_retry._given_back(torch.device("cuda", 0), 100) is expected
    assert clock[0] == pytest.approx(0.5 * waits, abs=0.5)
