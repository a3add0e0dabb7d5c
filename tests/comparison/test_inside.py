"""What a row's process does besides its row: refusals, its turn at the device, its own time."""

import io
import time
from pathlib import Path

import torch

import memopt
from memopt.comparison.inside import Pauses, Seat, refusal
from memopt.comparison.job import Job, Source
from memopt.comparison.pool import Pool


def test_a_refusal_names_the_least_or_what_was_in_the_way():
    assert refusal(memopt.BudgetError(2_000, 1_000)) == "refused: the minimum is 2.00 kB (1.95 KiB)"
    within = memopt.BudgetError(1_000, 2_000)
    assert refusal(within).endswith("is within the budget: steps took more than was planned")
    try:
        raise within from torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    except memopt.BudgetError as error:
        # Such a row is run once more, alone: see Pool.
        assert refusal(error).endswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")


def seat(folder: Path, name: str = "pauses") -> Seat:
    job = Job(Source(), "eager", True, "cpu", turn=str(folder / "turn"), pauses=str(folder / name))
    return Seat(job, io.StringIO())


def test_its_clock_stands_still_while_it_is_stopped(tmp_path):
    pauses, one = Pauses(tmp_path / "pauses"), seat(tmp_path)
    began = one.now()
    pauses.add(1000.0)
    pauses.add(500.0)
    assert -1500 <= one.now() - began < -1400
    assert Pauses(tmp_path / "pauses").seconds == 1500.0  # a file that is there is kept


def test_what_is_measured_has_the_device_to_itself(tmp_path):
    one, pool = seat(tmp_path), Pool(tmp_path, 10, True, 2, None)

    def is_free() -> bool:
        with pool._turn() as free:
            return free

    with one.around("searching"):
        assert is_free()
    with one.around("measuring operators"):
        assert not is_free()
        with one.turn():  # its own, already
            assert not is_free()
        assert not is_free()
    assert is_free()


def test_what_decides_by_time_asks_to_be_alone(tmp_path, monkeypatch):
    one = seat(tmp_path)
    words = []
    monkeypatch.setattr(one, "say", lambda kind, **content: words.append((kind, content)))
    with one.around("timing engines"), one.around("timing kernels"), one.around("measuring operators"):
        assert words == [("alone", {"device": ""})]
    assert words[1:] == [("beside", {})]
    with one.turn(), one.around("timing engines"):
        assert len(words) == 2


def test_waiting_for_its_turn_is_not_its_time(tmp_path, monkeypatch):
    one = seat(tmp_path)
    monkeypatch.setattr("fcntl.flock", lambda *args: time.sleep(0.2))
    before, began = time.perf_counter(), one.now()
    with one.turn():
        pass
    assert time.perf_counter() - before >= 0.4  # taken, and given back
    assert one.now() - began <= time.perf_counter() - before - 0.2
