"""Planning that is interrupted: the model is as it was, and can be planned again."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
import torch

import memopt
from memopt.solve import solver_worker
from memopt.step import graphs as step_graphs
from memopt.step import trial
from tests.training.steps import assert_equal, budget_for, gradients, make, step


@pytest.mark.quick("search-False")
@pytest.mark.parametrize(
    ("where", "planned_ahead"), [("search", False), ("search", True), ("trial", False), ("proof", False)]
)
def test_an_interrupted_plan_leaves_the_model_alone(monkeypatch, where, planned_ahead):
    monkeypatch.setenv("MEMOPT_CACHE", "0")
    model, x = make(layers=2, dropout=0.2)
    expected = step(model, x), gradients(model)
    model.zero_grad()
    budget = budget_for(model, (x,), 0.4)
    start = {key: (value.clone(), value._version) for key, value in model.state_dict(keep_vars=True).items()}

    def interrupt(*args, **options):
        raise KeyboardInterrupt

    target = {
        "search": (solver_worker, "curve"),
        "trial": (trial, "measure"),
        "proof": (step_graphs.StepGraphs, "recorded"),
    }[where]
    run = memopt.compile(model, budget, backend="aten")
    random = torch.get_rng_state()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*target, interrupt)
        if planned_ahead:
            run._memopt.plan((x,), {})
        else:
            run(x)
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict(keep_vars=True).items():
        assert torch.equal(value, start[key][0]) and value._version == start[key][1] and value.grad is None
    assert_equal((step(run, x), gradients(model)), expected)
    assert run.report.peak_bytes <= budget


SCRIPT = """
import signal, sys, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and so do their own
import memopt
from memopt.solve import solver_worker
def long(problem, *, seconds):
    time.sleep(600)
solver_worker.curve = long
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
before = [p.clone() for p in model.parameters()]
run = memopt.compile(model, "1GB", backend="aten")
x = torch.ones(4, 8)
random = torch.get_rng_state()
try:
    run(x)
except KeyboardInterrupt:
    same = all(map(torch.equal, before, model.parameters())) and torch.equal(random, torch.get_rng_state())
    print("interrupted", same, all(p.grad is None for p in model.parameters()), flush=True)
"""


def test_a_terminal_shows_progress_and_a_signal_stops_the_search():
    terminal, stderr = pty.openpty()
    environment = {**os.environ, "MEMOPT_CACHE": "0", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )
    os.close(stderr)
    shown, deadline = b"", time.monotonic() + 500
    try:
        while b"searching" not in shown and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                shown += os.read(terminal, 65536)
        assert b"planning Sequential: searching" in shown
        process.send_signal(signal.SIGINT)
        while select.select([terminal], [], [], 1)[0]:  # what is written to a full terminal would block
            try:
                if not os.read(terminal, 65536):
                    break
            except OSError:  # the other end is closed
                break
        assert process.communicate(timeout=300)[0].strip() == "interrupted True True"
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
