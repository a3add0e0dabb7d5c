"""Trial steps within the allocator's limit: what they begin with, and what is made of those that ran."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.resident import Resident
from memopt.step import trial_steps
from memopt.step.trial_step import Short, TrialMemory
from memopt.step.trial_steps import Held, TrialSteps

CPU = torch.device("cpu")
HOOKS = SimpleNamespace(lets_go=False, dropped=lambda gone: gone, handed=SimpleNamespace(gone=(3,)))
STATE = OptimizerFootprint(state_bytes=9, existing_state_bytes=4, step_peak_bytes=0)
FREE = TrialMemory(allocated_bytes=80, reserved_bytes=90, before_bytes=10)


@pytest.fixture
def device(monkeypatch):
    """Steps on a device that is there in name: what they find, and all that was done."""
    found, done = [], []

    def take(run, given, written, device, *, dropped, held):
        done.append(("step", run, dropped, held))
        return found.pop(0)

    monkeypatch.setattr(trial_steps, "take_step", take)
    monkeypatch.setattr(trial_steps, "allocated_after_gc", lambda device: done.append("settled"))
    monkeypatch.setattr(trial_steps, "grow", lambda device, size: done.append(("grown", size)))
    return SimpleNamespace(found=found, done=done)


def steps(hooks=HOOKS):
    return TrialSteps("run", hooks, (), frozenset(), Resident(optimizer=STATE))


def test_without_the_limit_a_step_lets_go_as_the_caller_s_loop_does(device, monkeypatch):
    monkeypatch.setattr(trial_steps, "numbers_alone", lambda run: f"{run} that lets go")
    device.found += [FREE, FREE]
    assert steps().free(100) is FREE
    steps(SimpleNamespace(**{**vars(HOOKS), "lets_go": True})).free(100)
    assert device.done == [("step", "run", (3,), False), ("step", "run that lets go", (3,), False)]


def test_within_the_limit_it_begins_with_what_it_reserved_and_the_state_to_come(device):
    device.found.append(FREE)
    assert steps().held(FREE, 100) == Held(95, True)
    anew = ["settled", ("grown", 95)]
    assert device.done == [*anew, ("step", "run", (3,), True), *anew]


def test_with_the_whole_limit_where_less_makes_it_hand_memory_back(device):
    slow = dataclasses.replace(FREE, retries=1)
    device.found += [slow, FREE]
    assert steps().held(FREE, 100) == Held(100, True)
    device.found += [slow, slow]
    assert steps().held(FREE, 100) == Held(95, False)
    device.found += [Short(7), slow]
    assert steps().held(FREE, 100) == Held(100, False)
    device.found += [Short(7), Short(8)]
    assert steps().held(FREE, 100) == Short(8)
    assert not device.found


def test_tensors_that_do_not_fit_are_no_step_s_to_try(device):
    assert steps().held(FREE, 84) == Short(1) and not device.done
