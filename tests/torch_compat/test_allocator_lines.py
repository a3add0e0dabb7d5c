"""allocator_lines: what the CPU's allocator does not say of blocks that it sees only go."""

import threading

import pytest
import torch

from memopt.memory.allocator_events import Recording
from memopt.torch_compat.allocator_lines import _level, unknown_blocks_unsaid

CPU = torch.device("cpu")


def many():
    """So many blocks of before a recording that the allocator has words of one of them."""
    return [torch.empty(3) for _ in range(1001)]


def test_a_recording_of_any_length_says_nothing_and_leaves_the_level(capfd):
    for _ in range(2):
        held = many()
        with Recording(CPU):
            held.clear()
    assert capfd.readouterr().err == "" and _level().value == 1


def test_without_it_the_allocator_speaks(capfd, monkeypatch):
    monkeypatch.setattr("memopt.torch_compat.allocator_lines._level", lambda: None)
    held = many()
    with Recording(CPU):
        held.clear()
    assert "Memory block of unknown size" in capfd.readouterr().err


def test_the_last_block_of_several_threads_sets_the_level_back():
    entered, leave = threading.Event(), threading.Event()

    def other():
        with unknown_blocks_unsaid():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError), unknown_blocks_unsaid():
        thread.start()
        assert entered.wait(10)
        raise KeyError
    assert _level().value == 2
    leave.set()
    thread.join()
    assert _level().value == 1


@pytest.mark.parametrize("asked", [0, 2, 3])
def test_who_asked_for_other_lines_gets_them(asked, monkeypatch):
    monkeypatch.setattr(_level(), "value", asked)
    with unknown_blocks_unsaid():
        assert _level().value == asked
    assert _level().value == asked
