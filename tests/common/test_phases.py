from __future__ import annotations

import contextlib

import torch

import memopt
from memopt.common import phases
from memopt.common.phases import Clock, phase


def test_time_of_an_inner_phase_is_not_the_outer_ones(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 9.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    clock = Clock()
    with clock.running(), phase("outer"), phase("inner"):
        pass
    assert clock.seconds == {"inner": 3.0, "outer": 6.0}


def test_phases_without_a_clock_count_nowhere():
    clock = Clock()
    with clock.running():
        pass
    with phase("unseen"):
        pass
    assert clock.seconds == {}


def test_what_surrounds_a_phase_is_not_its_time(monkeypatch):
    seen = []

    class Waits(phases.Watch):
        def now(self):
            return float(len(seen))

        @contextlib.contextmanager
        def around(self, name):
            seen.extend([name] * 7)
            yield

    monkeypatch.setattr(phases, "watch", Waits())
    clock = Clock()
    with clock.running(), phase("shared"):
        seen.append("")
    assert clock.seconds == {"shared": 1.0} and seen[0] == "shared"


def test_a_report_says_where_the_time_went():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    run = memopt.compile(model, "1MB", backend="aten")
    run(torch.randn(4, 8)).sum().backward()
    seconds = run.report.seconds
    assert {"tracing", "rewriting", "searching", "trial steps"} <= set(seconds)
    assert all(taken >= 0 for taken in seconds.values())
    assert "seconds of planning and compiling:" in str(run.report)
