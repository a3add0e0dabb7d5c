"""What the device holds for one model, and what a budget leaves of it."""

import dataclasses

import pytest
import torch

from memopt.budget import parse_budget
from memopt.memory.allocator import slack_bytes
from memopt.memory.optimizer import OptimizerFootprint
from memopt.memory.resident import Resident
from memopt.step.call_role import CallRole
from memopt.step.memory_ledger import MemoryLedger

CUDA = torch.device("cuda", 0)


def test_what_is_resident_is_counted_once_in_a_call_and_only_where_it_is_asked_for():
    counted = []

    def count():
        counted.append(1)
        return Resident(parameters=100 * len(counted))

    account = MemoryLedger(None, Resident(parameters=7))
    with account.call(count):
        pass
    assert account.resident.parameters == 7 and not counted
    with account.call(count):
        assert account.resident.total == account.resident.total == 100
    assert account.resident.parameters == 100 and len(counted) == 1
    with pytest.raises(RuntimeError), account.call(count):
        raise RuntimeError
    assert account.resident.parameters == 100, "a call that failed is not counted later"


@pytest.mark.parametrize(("budget", "limit"), [(None, None), ("600B", 600), ("50%", 500), (0.25, 250)])
def test_a_budget_is_a_size_or_a_share_of_what_the_model_takes(budget, limit):
    account = MemoryLedger(None if budget is None else parse_budget(budget), Resident())
    assert account.limit(1000) == limit


def test_what_is_left_beside_what_is_resident():
    account = MemoryLedger(parse_budget("1000B"), Resident(parameters=300, buffers=20))
    assert (account.usable(1000), account.available) == (1000, 680)
    account.margin = 100
    assert (account.usable(1000), account.available) == (900, 580)
    account.resident = Resident(parameters=2000)
    assert account.available == 0
    assert (
        MemoryLedger(parse_budget("50%"), Resident()).available is None
        and MemoryLedger(None, Resident()).available is None
    )


def test_what_is_left_of_a_fraction_that_is_not_fixed_yet_goes_by_what_is_planned():
    account = MemoryLedger(parse_budget("50%"), Resident(parameters=100))
    account.alone = 900
    assert account.available == 1000  # inference: as it is, weights included
    account.role = CallRole(trains=True)
    assert account.available == 400
    account.reference.trains(1600, "step")
    assert account.available == 700
    account.soft = True
    assert account.available is None


def test_on_cuda_the_allocator_has_its_part():
    limit = 10**9
    account = MemoryLedger(parse_budget(limit), Resident(device=CUDA))
    assert account.usable(limit) == limit - slack_bytes(limit, CUDA) < limit


def test_the_optimizer_s_step_holds_all_gradients_and_what_it_makes():
    footprint = OptimizerFootprint(state_bytes=200, existing_state_bytes=0, step_peak_bytes=30)
    resident = Resident(parameters=100, gradients=60, trainable=100, optimizer=footprint)
    assert MemoryLedger(None, resident).optimizer_peak() == 100 + 200 + 100 + 30
    assert MemoryLedger(None, dataclasses.replace(resident, loss=4)).optimizer_peak() == 100 + 200 + 100 + 30 + 4
    assert MemoryLedger(None, Resident(parameters=100)).optimizer_peak() == 0


def test_nobody_is_told_of_a_limit_before_somebody_asks():
    account, told = MemoryLedger(parse_budget("1kB"), Resident()), []
    account.hold(1000)
    account.hold = told.append
    account.hold(1000)
    assert told == [1000]
