"""Hard lists with known packings: that they are what they claim to be, and that a few of each kind are packed."""

import pytest

from benchmarks.packing_hard_instances import CAPACITY, KINDS, instance, instances
from memopt.solve.pack import Buffer, Switches, pack
from memopt.solve.pack_greedy import by_size
from memopt.solve.pack_problem import pieces
from tests.solve.check_pack import check_packing


@pytest.mark.parametrize("kind", KINDS)
def test_their_packings_are_known_and_they_are_hard(kind):
    for seed in range(3):
        hard = instance(kind, seed)
        assert hard == instance(kind, seed)
        size = max(offset + buffer.size for offset, buffer in zip(hard.offsets, hard.buffers, strict=True))
        check_packing(hard.buffers, hard.offsets, size, CAPACITY)
        assert 100 < len(hard.buffers) <= 440
        found = pieces(hard.buffers)
        assert max(piece.lower_bound for piece in found) == CAPACITY
        assert max(by_size(piece) for piece in found) > 1.04 * CAPACITY


def test_the_kinds_come_in_turn():
    assert [hard.name for hard in instances(6)] == [*(f"{kind} 0" for kind in KINDS), f"{next(iter(KINDS))} 1"]


@pytest.mark.parametrize(("kind", "seed"), [("guillotine", 4), ("pinwheel", 6), ("bands", 2)])
def test_some_are_packed(kind, seed):
    hard = instance(kind, seed)
    packing = pack(hard.buffers, hard.capacity, timeout=300)
    check_packing(hard.buffers, packing.offsets, packing.size, hard.capacity)


def test_beams_alone_and_exact_search_alone_do():
    hard = instance("bands", 2)
    for switches in (Switches(exact=False), Switches(beam=False)):
        packing = pack(hard.buffers, hard.capacity, timeout=300, switches=switches)
        check_packing(hard.buffers, packing.offsets, packing.size, hard.capacity)
    # Without either there are only heuristics, which end.
    packing = pack(hard.buffers, hard.capacity, timeout=300, switches=Switches(beam=False, exact=False))
    assert packing.size > hard.capacity
    packing = pack(hard.buffers, timeout=300, switches=Switches(beam=False, exact=False))
    check_packing(hard.buffers, packing.offsets, packing.size)


def test_each_piece_of_time_has_its_turns_until_all_fit():
    # The larger piece is the harder one: its turns may not end while there is time, nor take it all from the other.
    first, second = instance("pinwheel", 6), instance("bands", 2)
    after = max(buffer.upper for buffer in first.buffers)
    later = [Buffer(b.lower + after, b.upper + after, b.size) for b in second.buffers]
    buffers = [*first.buffers, *later]
    assert len(pieces(buffers)) == 2
    packing = pack(buffers, CAPACITY, timeout=300)
    check_packing(buffers, packing.offsets, packing.size, CAPACITY)
