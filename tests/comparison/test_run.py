"""Whole comparisons, each row in a process of its own; whatever happens to one of them is a row."""

import itertools
import json
import time

import pytest
import torch
from torch import nn

import memopt
from memopt.comparison.job import Job, Source
from memopt.comparison.progress import Case
from memopt.comparison.run import compare, compare_cases
from memopt.comparison.steps import Engine

FACTORIES = """
import os, signal, time, torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        print("libraries print what they like")
        return self.linear(x).relu()

def pair():
    return Tiny(), torch.ones(3, 64)

def dies():
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs():
    time.sleep(600)

def number():
    return 7
"""


@pytest.fixture
def factories(tmp_path, monkeypatch):
    (tmp_path / "compared.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_inference(factories):
    found = compare(
        "compared:pair", backends=("aten", "static"), peers=("eager", "checkpoint"), repeats=3, jobs=4, keep_caches=True
    )
    eager, checkpoint, aten, static = found.rows
    assert checkpoint.reason == "ValueError: saves memory of a training step: there is nothing to save in inference"
    for row in (eager, aten, static):
        assert not row.reason and len(row.seconds) == 3 and row.first_seconds > 0 and not row.differs
        assert row.error < 1e-6 and row.gradient_error is None and row.process_bytes > 50_000_000
    # Weights, the input, the product and its relu; memopt's engines work in place.
    tensors = (64 * 64 + 64) * 4 + 3 * 64 * 4
    assert eager.allocated_bytes == tensors + 2 * 3 * 64 * 4
    assert tensors < aten.allocated_bytes <= eager.allocated_bytes
    assert aten.predicted_bytes == aten.allocated_bytes
    assert found.mode == "inference" and found.versions["torch"] == torch.__version__ and not found.notes


@pytest.mark.long
def test_a_training_step_that_draws_random_numbers():
    model = memopt.models.build("gpt2:tiny", layers=1).train()
    found = compare(
        model,
        model.example_inputs(2, labels=True),
        backends=("aten",),
        peers=("eager",),
        budgets=("1kB",),
        optimizer="sgd",
        repeats=2,
        jobs=6,
        keep_caches=True,
    )
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["eager", "aten", "aten:1kB"]
    assert found.mode == "training" and "eval mode" in found.notes[0]
    assert rows["aten:1kB"].reason.startswith("refused: the minimum is") and rows["aten:1kB"].minimum_bytes > 1000
    for name in ("eager", "aten"):
        assert rows[name].error < 1e-6 and rows[name].gradient_error < 1e-5 and not rows[name].differs
    assert rows["aten"].allocated_bytes <= rows["aten"].predicted_bytes * 1.01


@pytest.mark.long
def test_a_crash_a_hang_and_a_wrong_factory_are_rows(factories):
    dead = compare("compared:dies", backends=("aten",), peers=("eager",), jobs=2)
    assert [row.reason.partition(":")[0] for row in dead.rows] == ["killed by SIGSEGV"] * 2
    assert dead.notes[0].startswith("errors are not known: no float64 reference (killed by SIGSEGV")
    started = time.monotonic()
    slow = compare("compared:hangs", backends=(), peers=("eager",), timeout=2)
    assert [row.reason for row in slow.rows] == ["no result within 2 s"]
    assert time.monotonic() - started < 3000
    (wrong,) = compare("compared:number", backends=(), peers=("eager",)).rows
    assert wrong.reason == "TypeError: compared:number returned int: it must return (model, inputs)"


def test_what_is_wrong_is_said_before_any_process_starts(monkeypatch):
    model, x = nn.Linear(2, 2).eval(), torch.ones(1, 2)
    with pytest.raises(ValueError, match="unknown engine 'tensorrt'"):
        compare(model, x, backends=("tensorrt",))
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        compare(model, x, optimizer="lion")
    with pytest.raises(ValueError, match="budgets are for a training step"):
        compare(model, x, budgets=("8GB",))
    model.hook = lambda: None
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        compare(model, x)
    monkeypatch.setattr(nn.Linear, "__module__", "__main__")
    with pytest.raises(ValueError, match="defined in __main__"):
        compare(nn.Linear(2, 2), x)


@pytest.mark.gpu
def test_on_cuda():
    model = memopt.models.build("resnet18:tiny").cuda().eval()
    found = compare(model, model.example_inputs(2), backends=("aten", "static"), peers=("eager",), repeats=3, jobs=3)
    for row in found.rows:
        assert not row.reason and not row.differs, row
        assert 0 < row.allocated_bytes <= row.reserved_bytes
        # The driver's context is part of what the process holds; the driver's tool may be missing.
        assert row.process_bytes is None or row.process_bytes > row.reserved_bytes
    assert "allocator" in found.settings and found.device.startswith("NVIDIA")


CROWD = """
import os, pathlib, signal, subprocess, time, torch

def pair():
    return torch.nn.Linear(2, 2).eval(), torch.ones(1, 2)

def greedy(place):
    \"\"\"Finds no memory while another process of the same kind is there.\"\"\"
    mine = pathlib.Path(place) / str(os.getpid())
    mine.touch()
    time.sleep(1)
    try:
        if len(list(pathlib.Path(place).iterdir())) > 1:
            time.sleep(1)
            raise torch.OutOfMemoryError("CUDA out of memory")
    finally:
        mine.unlink()
    return pair()

class Stamped(torch.nn.Module):
    def __init__(self, place):
        super().__init__()
        self.weight, self.place = torch.nn.Parameter(torch.ones(1)), place

    @torch.compiler.disable
    def forward(self, x):
        begun = time.monotonic()
        time.sleep(0.03)
        with open(self.place + "/" + str(os.getpid()), "a") as file:
            file.write(f"{begun} {time.monotonic()}\\n")
        return x * self.weight

def stamped(place):
    return Stamped(place).eval(), torch.ones(1)
"""


@pytest.fixture
def crowd(tmp_path, monkeypatch):
    (tmp_path / "crowd.py").write_text(CROWD)
    (tmp_path / "place").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(function, engines, arguments=True, **how):
        words = {"place": str(tmp_path / "place")} if arguments else {}
        job = Job(Source(f"crowd:{function}", words), "", False, "cpu", repeats=5, warmup=0)
        case = Case("crowd", job, tuple(map(Engine.parse, engines)))
        how = {"timeout": 500, "jobs": 3, "keep_caches": True, **how}
        return compare_cases([case], tmp_path / "work", **how)[0], tmp_path / "place"

    return run


@pytest.mark.long
def test_who_finds_no_memory_beside_others_is_run_again_alone(crowd):
    found, _ = crowd("greedy", ("eager", "compile"))
    assert [row.reason for row in found.rows] == ["", ""] and not found.notes
    assert all(row.error is not None for row in found.rows)


@pytest.mark.long
def test_others_are_stopped_while_one_is_timed(crowd):
    found, place = crowd("stamped", ("eager", "compile"))
    assert all(len(row.seconds) == 5 and row.first_seconds > 0 for row in found.rows)
    timed = []
    for path in place.iterdir():
        steps = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
        timed += [(path.name, *step) for step in steps[-5:] if len(steps) > 5]  # the truth runs twice, and unseen
    timed.sort(key=lambda step: step[1])
    assert len(timed) == 10
    assert all(step[2] <= after[1] for step, after in itertools.pairwise(timed) if step[0] != after[0])


@pytest.mark.long
def test_what_has_not_ended_in_time_is_a_row_and_the_rest_is_kept(crowd):
    seen = []
    found, _ = crowd("pair", ("eager", "aten"), arguments=False, watch=seen.append)
    assert [len(step[0].rows) for step in seen if step][-1] == 2 and not any(row.reason for row in found.rows)
    assert json.loads(seen[-1][0].to_json())["rows"][1]["name"] == "aten"


def test_the_time_for_everything_ends(factories, tmp_path):
    job = Job(Source("compared:hangs"), "", False, "cpu")
    case = Case("slow", job, (Engine("eager"), Engine("aten")))
    started = time.monotonic()
    (found,) = compare_cases([case], tmp_path, timeout=500, jobs=2, keep_caches=True, seconds=2)
    assert {row.reason for row in found.rows} == {"not ready within the 2 s that there were for everything"}
    assert "no float64 reference" in found.notes[0] and time.monotonic() - started < 300
