"""An independent judge of chunkings: walks every chunk of every stretch, sharing no code with the search."""

from __future__ import annotations

from memopt.solve.chunks import Chunking, ChunkProblem


class ChunkingError(ValueError):
    """A chunking is not what it claims to be."""


def check_chunks(problem: ChunkProblem, chunking: Chunking) -> None:
    """Accept stretches in order, each of free steps between places, that peak and cost what is claimed.

    Raises:
        ChunkingError: they do not; the message names the stretch or both figures.
    """
    steps, done, peak, extra = len(problem.free), 0, 0, 0.0
    for start, stop, chunks in [(s.start, s.stop, s.chunks) for s in chunking.stretches] + [(steps, steps, 1)]:
        if not done <= start <= stop <= steps or (chunks > 1 and start == stop):
            raise ChunkingError(f"stretch {start} to {stop} is out of order")
        for step in range(done, start):
            alive = sum(item.size for item in problem.storages if item.start <= step < item.stop)
            peak = max(peak, alive + problem.workspace[step])
        done = stop
        if chunks == 1:
            continue
        if not all(problem.free[start:stop]) or not (problem.places[start] and problem.places[stop]):
            raise ChunkingError(f"stretch {start} to {stop} may not run in chunks, or not begin or end there")
        if chunks not in problem.counts:
            raise ChunkingError(f"stretch {start} to {stop} runs in {chunks} chunks, which was no choice")
        samples = -(-problem.samples // chunks)
        whole = sum(item.size for item in problem.storages if item.start < start < item.stop)
        joined = sum(value.size for value in problem.values if start <= value.made < stop <= value.last)
        shared = sum(item.size for item in problem.storages if start <= item.start < stop and not item.divides)
        inside = [item for item in problem.storages if start <= item.start and item.stop <= stop and item.divides]
        for step in range(start, stop):
            alive = sum(item.size for item in inside if item.start <= step < item.stop) + problem.workspace[step]
            peak = max(peak, whole + joined + shared + -(-alive * samples // problem.samples))
        extra += sum(problem.extra(step, chunks) for step in range(start, stop)) + problem.byte_seconds * joined
    if peak != chunking.peak_bytes:
        raise ChunkingError(f"the peak is {peak} bytes, not {chunking.peak_bytes} as claimed")
    if abs(extra - chunking.extra_seconds) > 1e-9 + 1e-6 * extra:
        raise ChunkingError(f"{extra} seconds are added, not {chunking.extra_seconds} as claimed")
