"""What ranks tell each other of their first step; over two processes it is in training/test_fsdp.py and test_ddp.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.budget import BudgetError
from memopt.calls import agreement as agreement_module
from memopt.calls.agreement import Agreement
from memopt.capture.export import CaptureError

RANKS = 2**20


@pytest.fixture
def others(monkeypatch):
    """What the others have said; what this rank says is appended to what is returned."""

    def say(value: int) -> list[int]:
        heard: list[int] = []

        def most_of(own, groups, device):
            heard.append(own)
            return max(own, value)

        monkeypatch.setattr(agreement_module, "groups_of", lambda model: ["all"])
        monkeypatch.setattr(agreement_module, "most_of", most_of)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        return heard

    return say


def sought(*, due=True):
    return Agreement(nn.Linear(2, 2), due=due).sought()


def test_ranks_that_can_all_begin_are_asked_once(others):
    heard, found = others(0), Agreement(nn.Linear(2, 2), due=True)
    for _ in range(2):
        with found.sought():
            pass
    assert heard == [0]


def test_a_rank_hears_which_other_has_no_plan_and_which_has_failed(others):
    others(5000 * RANKS + 4)
    words = r"^no plan fits the budget of another rank: rank 3 needs 5\.00 kB"
    with pytest.raises(BudgetError, match=words) as error, sought():
        pass
    assert error.value.minimum_bytes == 5000
    others(4)
    with (
        pytest.raises(CaptureError, match="rank 3 failed in its first step"),
        Agreement(nn.Linear(2, 2), due=True).sought(),
    ):
        pass


def test_a_rank_that_is_refused_tells_so_and_names_the_one_that_needs_most(others):
    heard = others(5000 * RANKS + 4)
    with pytest.raises(BudgetError, match=r"rank 3 needs 5\.00 kB .*the most of all ranks") as error, sought():
        raise BudgetError(3000, 2000)
    assert heard == [3000 * RANKS + 2] and error.value.minimum_bytes == 5000


def test_another_error_is_told_and_stays_what_it_is(others):
    heard = others(0)
    with pytest.raises(ZeroDivisionError), sought():
        raise ZeroDivisionError
    assert heard == [2]


@pytest.mark.parametrize(("due", "gradients"), [(False, True), (True, False)], ids=["no budget", "inference"])
def test_nothing_is_asked(others, due, gradients):
    heard = others(0)
    with torch.set_grad_enabled(gradients), sought(due=due):
        pass
    assert heard == []
