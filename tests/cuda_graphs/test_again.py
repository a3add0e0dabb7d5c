"""A step that an earlier process captured: loaded, and captured anew where there is still something in it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import memopt
from memopt.cuda_graphs import trial
from memopt.cuda_graphs.trial import Gain
from memopt.step import memory_ledger, trial_steps, warm_start
from memopt.step.trial_step import TrialMemory, mutated
from tests.cuda_graphs.test_trial import Net, pytestmark, tape  # noqa: F401

FASTER, SMALLER = Gain.TIME.value, Gain.MEMORY.value


@pytest.fixture(autouse=True)
def _device(tape, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "memopt"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(warm_start, "held_bytes", lambda device: 10**9)
    monkeypatch.setattr(warm_start, "measurable", lambda session, hooks: hooks.captured and mutated(hooks.captured))


def trained(model, budget="1GB"):
    """As in a process of its own: the report after some steps, and their losses."""
    torch._dynamo.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run, losses = memopt.compile(model, budget, backend="inductor"), []
    torch.manual_seed(3)
    for _ in range(4):
        loss = run(torch.linspace(-1, 1, 512).reshape(32, 16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return run.report, losses


def made():
    torch.manual_seed(0)
    return Net()


def is_found(report):
    return "generating code" not in report.seconds


def test_a_step_that_was_captured_is_recorded_again(tape):  # noqa: F811
    first, losses = trained(made())
    captures, replays = tape.captures, tape.replays
    second, same = trained(made())
    assert not is_found(first) and is_found(second)
    assert FASTER in first.notes and FASTER in second.notes
    assert tape.captures == 2 * captures and tape.replays == 2 * replays
    assert losses == same
    ours, theirs = (dataclasses.replace(report, seconds={}) for report in (first, second))
    assert ours == theirs


@pytest.mark.parametrize("why", ["slower", "short"])
def test_where_that_is_no_gain_any_more_its_code_runs(tape, monkeypatch, why):  # noqa: F811
    losses = trained(made())[1]
    if why == "slower":
        monkeypatch.setattr(trial, "_WORTH", 0.0)
    else:
        tape.failing = [True] * 8
    second, same = trained(made())
    assert is_found(second) and losses == same
    assert FASTER not in second.notes
    assert [note for note in second.notes if note.startswith("the step is not captured")]


def step_that_lies_badly(*args, held=False, **_):
    return TrialMemory(1, 2 * 10**9, 0, retries=3 * held)


def test_a_step_that_fits_only_captured_is_found_so(tape, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trial_steps, "take_step", step_that_lies_badly)
    first, losses = trained(made())
    second, same = trained(made())
    assert is_found(second) and losses == same
    assert SMALLER in first.notes and SMALLER in second.notes


def test_where_it_fits_no_more_it_is_planned_anew(tape, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trial_steps, "take_step", step_that_lies_badly)
    losses = trained(made())[1]
    tape.failing = [True] * 3
    second, same = trained(made())
    assert not is_found(second) and losses == same


def test_a_step_that_was_held_to_the_budget_is_found_so(tape, monkeypatch):  # noqa: F811
    monkeypatch.setattr(trial_steps, "take_step", step_that_lies_badly)
    tape.failing = [True] * 99
    first, losses = trained(made())
    second, same = trained(made())
    assert is_found(second) and losses == same
    assert [note for note in second.notes if "held to the budget" in note] and first.notes == second.notes


def test_one_that_was_not_is_planned_anew_where_it_is(tape, monkeypatch):  # noqa: F811
    tape.failing = [True] * 99
    losses = trained(made())[1]
    monkeypatch.setattr(trial_steps, "take_step", step_that_lies_badly)
    second, same = trained(made())
    assert not is_found(second) and losses == same


@pytest.mark.long
def test_a_share_of_what_a_step_takes_is_that_of_its_first_process(monkeypatch):
    """Libraries may be seen to keep more than was known when the limit was set."""
    monkeypatch.setattr(
        trial_steps, "take_step", lambda *args, held=False, **_: TrialMemory(1, 1, 0, kept_bytes=5 * 10**5)
    )
    for module in (warm_start, memory_ledger):
        monkeypatch.setattr(module, "count_library_bytes", lambda device, size: None)
    first, _ = trained(made(), "100%")
    second, _ = trained(made(), "100%")
    assert is_found(second) and first.budget_bytes == second.budget_bytes
