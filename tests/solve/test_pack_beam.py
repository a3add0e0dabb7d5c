"""Beam search alone: what it finds are packings, and each switch changes only how soon they are found."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.packing_hard_instances import instance
from benchmarks.packing_instances import cut_rectangle
from memopt.solve import pack_beam
from memopt.solve.pack_beam import WEIGHTS, Beam, Switches, Weights
from memopt.solve.pack_problem import Buffer, pieces
from tests.solve.check_pack import check_packing
from tests.solve.packings import GAPPED, crowded_lists, gapped_lists, least_size

OFF = [None, "even", "fewest", "beneath", "distinct"]


def without(name: str | None) -> Switches:
    return dataclasses.replace(Switches(), **({name: False} if name else {}))


@pytest.mark.parametrize("off", OFF)
@settings(max_examples=40)
@given(
    buffers=st.one_of(crowded_lists(alignments=(1, 2, 4, 6)), gapped_lists()),
    weights=st.sampled_from(WEIGHTS),
    width=st.integers(1, 40),
    noise=st.sampled_from([0.0, 0.5]),
)
def test_what_is_found_is_a_packing_and_nothing_is_found_below_the_least(off, buffers, weights, width, noise):
    for piece in pieces(buffers):
        beam = Beam(piece, without(off))
        least = least_size(list(piece.buffers)) if len(piece.buffers) < 8 else piece.lower_bound
        assert not beam.run(least - 1, width, weights, math.inf, noise)
        for capacity in (least, least + 2, 3 * least):
            if beam.run(capacity, width, weights, math.inf, noise):
                offsets = [offset * piece.unit for offset in beam.offsets]
                check_packing(piece.buffers, offsets, piece.size(beam.offsets), capacity)
            else:
                assert capacity < 3 * least


@pytest.mark.parametrize(("buffers", "least"), [*zip(GAPPED, (6, 5, 7), strict=True)])
def test_lists_with_a_gap_are_packed(buffers, least):
    (piece,) = pieces(buffers)
    assert Beam(piece).run(least, 100, WEIGHTS[0], math.inf)


@pytest.mark.parametrize(("count", "seed"), [(60, 1), (120, 2), (200, 3)])
def test_cut_rectangles_are_put_together_again(count, seed):
    (piece,) = pieces(cut_rectangle(count, 2 * count, 1 << 20, 1024, seed))
    beam = Beam(piece)
    assert any(
        beam.run(1 << 20, width, weights, math.inf, noise, number)
        for number, noise in enumerate((0.0, 0.3, 0.3, 0.3))
        for width in (10, 30)
        for weights in WEIGHTS
    )
    check_packing(piece.buffers, [piece.unit * offset for offset in beam.offsets], 1 << 20)


def test_what_fits_beneath_a_choice_comes_first():
    # The long buffer lies on the short one: without the switch it is laid on the ground, and the short one above it.
    buffers = [Buffer(0, 4, 3), Buffer(0, 1, 2), Buffer(1, 4, 2), Buffer(4, 5, 5)]
    (piece,) = pieces([*buffers, Buffer(0, 5, 1)])
    assert Beam(piece).run(6, 1, Weights(), math.inf)


def test_the_same_seed_finds_the_same_and_others_differ():
    (piece,) = pieces(cut_rectangle(60, 120, 1 << 20, 1024, 1, shorten=0.8))
    found = []
    for seed in (1, 1, 2, 3, 4):
        beam = Beam(piece)
        assert beam.run(1 << 22, 5, WEIGHTS[0], math.inf, 0.5, seed)
        found.append(tuple(beam.offsets))
    assert found[0] == found[1]
    assert len(set(found)) > 1


def test_nothing_is_looked_at_past_the_deadline():
    (piece,) = pieces(cut_rectangle(60, 120, 1 << 20, 1024, 1))
    beam = Beam(piece)
    assert not beam.run(1 << 20, 10, WEIGHTS[0], 0.0)
    assert beam.states == 0


def test_small_tables_and_wide_numbers_change_nothing(monkeypatch):
    buffers = cut_rectangle(60, 120, 1 << 20, 1024, 1, shorten=0.3)
    (piece,) = pieces(buffers)
    beam = Beam(piece)
    found = beam.run(1 << 20, 10, WEIGHTS[2], math.inf)
    monkeypatch.setattr(pack_beam, "_TABLE", 1)
    small = Beam(piece)
    assert small.run(1 << 20, 10, WEIGHTS[2], math.inf) is found
    assert (small.states, small.offsets) == (beam.states, beam.offsets)
    # One size is off by a byte, so that the unit is a byte, and each is counted in 64 bits.
    (wide,) = pieces([b._replace(size=(b.size << 12) - (not n)) for n, b in enumerate(buffers)])
    assert wide.unit == 1
    assert Beam(wide).run(1 << 33, 10, WEIGHTS[2], math.inf)


def test_large_pieces_are_left_to_others(monkeypatch):
    (piece,) = pieces(cut_rectangle(60, 120, 1 << 20, 1024, 1))
    assert Beam.can(piece)
    monkeypatch.setattr(pack_beam, "_MEMBERS", 100)
    assert not Beam.can(piece)


def test_a_switch_matters():
    hard = instance("pinwheel", 6)
    (piece,) = pieces(hard.buffers)

    def found(switches: Switches) -> bool:
        beam = Beam(piece, switches)
        return any(
            beam.run(hard.capacity, 10, weights, math.inf, noise, seed)
            for seed, noise in enumerate((0.0, 0.3, 0.3))
            for weights in WEIGHTS
        )

    assert found(Switches())
    assert not found(without("beneath"))
