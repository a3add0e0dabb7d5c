"""At which sizes code for many sizes keeps a budget, as far as it is known."""

import types

import pytest

from memopt.inductor import served_sizes
from memopt.inductor.replay import ReplayError
from memopt.inductor.served_sizes import ServedSizes, sizes_errors
from memopt.step.sizes_apart import SizesError
from memopt.torch_compat.symbols import UnknownSizeError


@pytest.fixture
def sizes(monkeypatch):
    monkeypatch.setattr(served_sizes, "symbols_of", lambda inputs: {0: "batch", 2: "length"})
    return ServedSizes(types.SimpleNamespace(called=lambda place: f"argument {place}"), [])


def test_sizes_are_those_of_the_places_of_symbols(sizes):
    assert sizes.of([4, None, 7]) == {"batch": 4, "length": 7}


@pytest.mark.parametrize("grows", [False, True])
def test_smaller_ones_are_covered_where_every_tensor_grows(sizes, grows):
    sizes.grows = grows
    sizes.keep({"batch": 4, "length": 8})
    sizes.refuse({"batch": 8, "length": 16})
    same, smaller, mixed = ({"batch": b, "length": n} for b, n in ((4, 8), (4, 6), (3, 9)))
    assert sizes.kept(same) and sizes.kept(smaller) is grows and not sizes.kept(mixed)
    over, larger, other = ({"batch": b, "length": n} for b, n in ((8, 16), (9, 16), (9, 15)))
    assert sizes.refused(over) and sizes.refused(larger) is grows and not sizes.refused(other)


def named(batch, length):
    return {"batch": batch, "length": length}


def test_larger_sizes_are_counted_where_they_cover_the_others(sizes):
    assert sizes.to_count(named(4, 8), 4) == [named(4, 8)]
    sizes.grows = True
    assert sizes.to_count(named(4, 8), 0) == [named(4, 8)]
    assert sizes.to_count(named(4, 8), 0, named(4, 32)) == [named(4, 32), named(4, 8)]
    sizes.keep(named(4, 32))
    sizes.keep(named(16, 8))
    assert sizes.to_count(named(8, 16), 0) == [named(16, 32), named(8, 16)]
    assert sizes.to_count(named(8, 40), 4) == [named(16, 60), named(12, 60), named(8, 40)]
    assert sizes.to_count(named(32, 40), 4) == [named(48, 60), named(32, 40)]


def test_what_is_known_not_to_keep_the_budget_is_not_counted_anew(sizes):
    sizes.grows = True
    sizes.keep(named(4, 32))
    sizes.keep(named(16, 8))
    sizes.refuse(named(16, 32))
    assert sizes.to_count(named(8, 16), 2) == [named(10, 20), named(8, 16)]
    sizes.refuse(named(10, 20))
    assert sizes.to_count(named(8, 17), 2) == [named(8, 17)]


def test_a_refusal_lists_the_sizes(sizes):
    error = sizes.not_kept({"batch": 4, "length": 8})
    assert error.others and "the budget at argument 0 = 4, argument 2 = 8" in str(error)


@pytest.mark.parametrize(("error", "line"), [(ReplayError("why"), "is not known: why"), (UnknownSizeError("so"), "so")])
def test_what_it_cannot_do_is_an_error_of_sizes(error, line):
    with pytest.raises(SizesError, match=line), sizes_errors():
        raise error
