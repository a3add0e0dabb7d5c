"""Loops of other libraries, two epochs and a resumed one, within a share of what they take alone: peaks and losses."""

import importlib.util

import pytest

from benchmarks.integrations.__main__ import SHARE
from benchmarks.integrations.run import row_of
from benchmarks.integrations.watch import Watch
from memopt.memory.allocator_events import is_profiled

NEEDS = {"peft": "peft", "trl": "trl", "lightning": "lightning"}


def cases():
    """Each library's loop in both precisions."""
    names = ("trainer", "peft", "trl", "lightning", "accelerate-before", "accelerate-after")
    for name in names:
        for bf16 in (False, True):
            yield pytest.param(name, bf16, id=f"{name}-{'bf16' if bf16 else 'float32'}")


@pytest.mark.parametrize(("name", "bf16"), list(cases()))
def test_the_budget_holds_to_the_end_of_two_epochs_and_losses_are_the_librarys(name, bf16):
    for library in ("accelerate", NEEDS.get(name, "transformers")):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"make test-integrations installs {library}")
    (row,) = row_of(name, bf16, [SHARE], "aten")
    assert row.good, row.line()
    assert len(row.peaks) == 6 and row.losses > 30


def test_single_steps_of_the_first_epoch_are_looked_at_and_the_second_as_a_whole():
    watch, looked = Watch(6), []
    for number in range(14):
        watch.step(number)
        looked.append(watch._recording is not None)
        watch.step_done(number)
    watch.end()
    assert looked == [False] * 3 + [True] * 2 + [False] + [True] * 8
    assert len(watch.peaks) == 3


def test_a_run_that_raises_is_looked_at_no_more():
    with pytest.raises(ZeroDivisionError), Watch(6) as watch:
        watch.step(3)
        assert is_profiled()
        raise ZeroDivisionError
    assert not is_profiled() and len(watch.peaks) == 1
