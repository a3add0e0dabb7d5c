"""What watches the steps of all optimizers: hooked while an owner lives, and no longer."""

import gc

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from memopt.memory.step_watch import StepWatch


class Owner:
    """Something with weak references."""


def step():
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.step()
    return optimizer


def hooks():
    return len(torch_optimizer._global_optimizer_post_hooks)


def test_steps_are_seen_while_an_owner_lives():
    seen, before = [], hooks()
    watch = StepWatch(seen.append)
    step()
    assert not seen and not watch.hooked and hooks() == before
    first, second = Owner(), Owner()
    watch.add(first)
    watch.add(second)
    watch.add(second)
    assert set(watch) == {first, second} and hooks() == before + 1
    del first
    gc.collect()
    assert seen == [] and step() is seen[0] and len(seen) == 1 and list(watch) == [second]
    del second
    gc.collect()
    assert not watch.hooked and hooks() == before
    step()
    assert len(seen) == 1


def test_a_later_owner_is_watched_for_again():
    seen = []
    watch = StepWatch(seen.append)
    for count in (1, 2):
        owner = Owner()
        watch.add(owner)
        step()
        assert len(seen) == count
        del owner
        gc.collect()
        assert not watch.hooked


@pytest.mark.parametrize("size", [2, 5])
def test_owners_that_go_in_one_collection_leave_no_hook(size):
    before, watch = hooks(), StepWatch(lambda optimizer: None)
    owners = [Owner() for _ in range(size)]
    for owner in owners:
        owner.owners = owners
        watch.add(owner)
    assert hooks() == before + 1
    del owner, owners
    gc.collect()
    assert hooks() == before and not watch.hooked and list(watch) == []


def test_two_that_watch_are_told_apart():
    ones, others = [], []
    one, other = StepWatch(ones.append), StepWatch(others.append)
    owner, another = Owner(), Owner()
    one.add(owner)
    other.add(another)
    del another
    gc.collect()
    step()
    assert len(ones) == 1 and others == [] and one.hooked and not other.hooked


def test_a_step_that_is_compiled_is_not_seen(monkeypatch):
    seen, owner = [], Owner()
    watch = StepWatch(seen.append)
    watch.add(owner)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    step()
    assert seen == []
