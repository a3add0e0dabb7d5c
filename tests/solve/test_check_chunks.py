"""The judge of chunkings: what is claimed is what is found, step by step."""

import dataclasses

import pytest

from memopt.solve.chunks import Chunking, ChunkProblem, Storage, Stretch, Value
from tests.solve.check_chunks import ChunkingError, check_chunks

# Three steps on a batch of 4; each reads what the one before made.
PROBLEM = ChunkProblem(
    samples=4,
    storages=tuple(Storage(step, step + 2, 8) for step in range(3)),
    values=tuple(Value(step, step + 1, 8) for step in range(3)),
    workspace=(0, 0, 0),
    seconds=(1.0, 1.0, 1.0),
    free=(True, True, False),
    places=(True, True, True, True),
    counts=(2, 4),
    call_seconds=0.5,
    byte_seconds=0.25,
)
# The stretch's one storage that ends inside takes half; what it leaves is put together.
CHUNKED = Chunking((Stretch(0, 2, 2),), 16, 2 * 0.5 + 8 * 0.25)


def test_whole_steps_peak_where_two_values_meet():
    check_chunks(PROBLEM, Chunking((), 16, 0.0))


def test_a_stretch_is_accepted_with_what_it_adds():
    check_chunks(PROBLEM, CHUNKED)


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ({"peak_bytes": 15}, "the peak is 16 bytes, not 15"),
        ({"extra_seconds": 1.0}, "3.0 seconds are added, not 1.0"),
        ({"stretches": (Stretch(0, 2, 3),)}, "3 chunks, which was no choice"),
        ({"stretches": (Stretch(1, 3, 2),)}, "may not run in chunks"),
        ({"stretches": (Stretch(0, 0, 2),)}, "out of order"),
        ({"stretches": (Stretch(0, 2, 2), Stretch(1, 2, 2))}, "stretch 1 to 2 is out of order"),
    ],
)
def test_another_claim_is_refused(claim, message):
    with pytest.raises(ChunkingError, match=message):
        check_chunks(PROBLEM, dataclasses.replace(CHUNKED, **claim))


def test_a_stretch_begins_and_ends_where_it_may():
    closed = dataclasses.replace(PROBLEM, places=(True, True, False, True))
    with pytest.raises(ChunkingError, match="not begin or end there"):
        check_chunks(closed, CHUNKED)
