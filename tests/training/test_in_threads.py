"""Models that several threads plan at once, beside one that torch.compile compiles: each as in eager."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

import memopt
from memopt.memory.allocator_events import is_profiled
from memopt.torch_compat import patched
from tests.inductor.test_peak_lower_bound import needs_compiler


class Layers(nn.Module):
    """Layers, rows that are written, and a size that code asks for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x)).tanh()
            x = torch.slice_scatter(x, x[:, 1:] * 0.5, 1, 0, x.shape[1] - 1)
        return x.square().mean()


def steps(run, model, width):
    found = []
    for rows in (5, 3):
        x = torch.ones(rows, width) * torch.arange(width) / width
        loss = run(x)
        loss.backward()
        found += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        model.zero_grad(set_to_none=True)
    return found


@pytest.mark.quick("aten")
@pytest.mark.parametrize("backend", ["aten", pytest.param("inductor", marks=needs_compiler)])
def test_threads_may_plan_at_once(own_caches, backend):
    is_profiled()  # ends what a loop of an earlier test has left open in this thread
    torch.manual_seed(0)
    widths = (6, 7, 8)
    models = [Layers(width) for width in widths]
    expected = [steps(twin, twin, width) for twin, width in zip(copy.deepcopy(models), widths, strict=True)]
    runs = [memopt.compile(model, "10MB", backend=backend) for model in models[:2]]
    runs.append(torch.compile(models[2], backend="aot_eager"))
    failures, start = list[Exception](), threading.Barrier(len(runs))

    def work(place):
        start.wait(60)
        try:
            found = steps(runs[place], models[place], widths[place])
            for a, b in zip(found, expected[place], strict=True):
                torch.testing.assert_close(a, b)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(place,), daemon=True) for place in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert all(run.report.peak_bytes <= run.report.budget_bytes for run in runs[:2])
    assert not patched._blocks


SCRIPT = """
import threading, torch, memopt
from torch import nn
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
run = memopt.compile(model, "1MB", backend="aten")
def train():
    for _ in range(3):
        run(torch.ones(4, 8)).sum().backward()
thread = threading.Thread(target=train)
thread.start()
thread.join()
print(run.report.peak_bytes <= 10**6)
"""


@pytest.mark.long
def test_a_process_whose_thread_has_trained_ends_well():
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=500)
    assert (found.returncode, found.stdout.strip()) == (0, "True"), found.stderr
