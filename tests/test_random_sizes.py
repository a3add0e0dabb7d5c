"""Random modules whose inputs vary in batch and length, planned with symbols: at five sizes each equal eager."""

from __future__ import annotations

import copy

import pytest
import torch

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler
from tests.random_sizes import compared, sized_program

PROGRAMS, CHUNK = 300, 10


def as_eager(number, dynamic):
    torch._dynamo.reset()
    run, differences = compared(number, lambda model: memopt.compile(model, "1GB", dynamic=dynamic))
    assert not differences, f"{number}: {differences[:3]}\n{sized_program(number).source}"
    return run


def test_the_generator_writes_what_eager_runs_and_a_difference_is_seen():
    for number in range(40):
        assert compared(number, lambda model: model)[1] == []

    def other(model):
        twin = copy.deepcopy(model)

        def run(x, ids, mask):
            loss, *others = twin(x, ids, mask)
            return loss * 1.01, *others

        return run

    assert compared(0, other)[1]
    assert [sized_program(3).source] * 2 == [sized_program(number).source for number in (3, 3)]


@needs_compiler
@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("number", [4, 8])
def test_a_program_at_five_sizes(own_caches, number, dynamic):
    as_eager(number, dynamic)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, CHUNK))
def test_programs_at_five_sizes(own_caches, first):
    for number in range(first, first + CHUNK):
        as_eager(number, None if number % 2 else True)
