"""What a step asks the allocator for, from the allocator's history."""

from __future__ import annotations

import pytest
import torch

from memopt.memory.requests import Requests, blocks_of
from memopt.solve.placement import Block


def event(action, address, size):
    return {"action": action, "addr": address, "size": size}


MARK = [event("alloc", 1, 7), event("free_requested", 1, 7), event("free_completed", 1, 7)]


def test_blocks_have_the_lines_that_they_live_in():
    trace = [
        event("alloc", 90, 4096),  # before the first line
        *MARK,
        event("alloc", 100, 1000),
        event("alloc", 200, 2000),
        event("free_requested", 200, 2000),
        event("free_completed", 200, 2000),
        *MARK,
        event("segment_map", 0, 20 * 2**20),
        event("free_completed", 100, 1000),
        event("free_completed", 90, 4096),
        event("alloc", 100, 3000),  # the same place
        *MARK,
    ]
    assert blocks_of(trace, [0, 4, 5]) == [Block(1000, 0, 4), Block(2000, 0, 0, 2), Block(3000, 4, 5)]


@pytest.mark.parametrize("lines", [[0], [0, 1, 2]], ids=["fewer", "more"])
def test_a_history_that_shows_other_lines_says_nothing(lines):
    assert blocks_of([*MARK, *MARK], lines) is None


@pytest.mark.gpu
def test_requests_of_a_real_allocator_are_noted():
    torch.zeros(1, device="cuda")  # a history of an allocator that has given nothing out yet crashes
    requests = Requests(torch.device("cuda"))
    with requests.noting():
        requests.before(0)
        first = torch.empty(3 * 2**20, dtype=torch.uint8, device="cuda")
        requests.before(1)
        second = torch.empty(5 * 2**20, dtype=torch.uint8, device="cuda")
        del first
        requests.before(2)
        del second
        requests.before(3)
    assert requests.blocks == [Block(3 * 2**20, 0, 1), Block(5 * 2**20, 1, 2)]
