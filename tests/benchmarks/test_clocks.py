"""What is read of NVIDIA's tool; with the tool itself where there is a GPU."""

from __future__ import annotations

import datetime
import time

import pytest
import torch

from benchmarks.clocks import Clocks, seen, settled

LINES = """\
2026/01/02 10:00:00.100, 1980, 300.10, 0x0000000000000000
2026/01/02 10:00:01.000, 1700, 690.00, 0x0000000000000004
2026/01/02 10:00:01.050, 1600, 700.00, 0x0000000000000004
2026/01/02 10:00:01.100, 1500, 650.00, 0x0000000000000000
2026/01/02 10:00:01.150, [N/A], 650.00, 0x0000000000000000
2026/01/02 10:00:01.2"""


def test_looks_since_a_moment_are_summed_up():
    found = seen(LINES, datetime.datetime(2026, 1, 2, 10, 0, 1))
    assert found == {"clock_hz": 1.6e9, "power_watts": 690.0, "power_limited": pytest.approx(2 / 3)}
    assert seen(LINES, datetime.datetime(2026, 1, 2, 11)) == {} == seen("", datetime.datetime(2026, 1, 2))


def test_steps_are_taken_until_the_time_is_over(monkeypatch):
    now = iter([0.0, 0.5, 1.5, 2.5])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    taken = []
    settled(lambda: taken.append(1), 2.0)
    assert len(taken) == 3


def test_without_the_tool_nothing_is_known(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with Clocks("none") as clocks:
        assert clocks.since(datetime.datetime(2026, 1, 2)) == {}


@pytest.mark.gpu
def test_the_clock_of_a_gpu_that_computes_is_seen():
    began, a = datetime.datetime.now(), torch.randn(4096, 4096, device="cuda")
    with Clocks(str(torch.cuda.get_device_properties(0).uuid)) as clocks:
        settled(lambda: torch.cuda.synchronize() if (a @ a).numel() else None, 2.0)
        found = clocks.since(began)
    assert found["clock_hz"] > 1e8 and found["power_watts"] > 10 and 0 <= found["power_limited"] <= 1
