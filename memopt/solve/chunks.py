"""Which stretches of a sequence of steps to run in chunks of the batch, and in how many: least time within a limit.

A stretch [start, stop) runs once for each chunk, one chunk after the other. What is read in it stays whole throughout,
and so do its results, which are put together chunk by chunk; everything else in it exists for one chunk at a time:

    peak(start, stop, k) = read before + results + largest sum inside · samples of a chunk / samples

Stretches do not overlap, so both their peaks and their times are independent of each other, and the best set of them is
a shortest path over the places where a stretch may begin or end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memopt.solve.liveness import profile

_SECOND = 10**12  # times are added up in whole numbers, so that equal ones are
_NEVER = np.iinfo(np.int64).max // 2
_PLACES = 400  # that are looked at: in longer sequences, the ones where fewest bytes are alive


@dataclasses.dataclass(frozen=True)
class Storage:
    """Memory that is taken from step `start` to before step `stop`; `stop` is steps + 1 for what stays after the last.

    Attributes:
        divides: whether a chunk of the batch needs its share only; else a stretch holds all of it throughout.
    """

    start: int
    stop: int
    size: int
    divides: bool = True


@dataclasses.dataclass(frozen=True)
class Value:
    """A value of the batch, made in step `made` and read last in step `last` (steps, where it stays after the last)."""

    made: int
    last: int
    size: int


@dataclasses.dataclass(frozen=True)
class ChunkProblem:
    """A sequence of steps.

    Attributes:
        samples: the size of the batch, at least 2.
        storages: memory; sizes in bytes, for the whole batch.
        values: what has to be put together where it is read behind the stretch that makes it.
        workspace: bytes that each step takes beside, for the whole batch.
        seconds: of each step with the whole batch.
        free: whether each step may be in a stretch.
        places: whether a stretch may begin or end before each step, and at the end: one more than steps.
        counts: numbers of chunks to choose from, rising.
        least_seconds: of a step, however small the chunk.
        call_seconds: that each further call of a step adds at least.
        byte_seconds: for each byte that is put together.
    """

    samples: int
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    workspace: tuple[int, ...]
    seconds: tuple[float, ...]
    free: tuple[bool, ...]
    places: tuple[bool, ...]
    counts: tuple[int, ...]
    least_seconds: float = 0.0
    call_seconds: float = 0.0
    byte_seconds: float = 0.0

    def extra(self, step: int, chunks: int) -> float:
        """Seconds that a step takes longer in so many chunks; a view takes none."""
        if not self.seconds[step]:
            return 0.0
        short = chunks * self.least_seconds - self.seconds[step]
        return max(0.0, short) + (chunks - 1) * self.call_seconds


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Steps from `start` to before `stop`, in `chunks` chunks."""

    start: int
    stop: int
    chunks: int


@dataclasses.dataclass(frozen=True)
class Chunking:
    """Stretches in order, the peak in bytes with them, and the time that they add."""

    stretches: tuple[Stretch, ...]
    peak_bytes: int
    extra_seconds: float


def live_bytes(problem: ChunkProblem) -> list[int]:
    """Bytes alive at each step where nothing runs in chunks, workspace included."""
    return [int(size) for size in _live(problem)]


class ChunkSearch:
    """Answers how to keep one limit or another, from figures that are made once."""

    def __init__(self, problem: ChunkProblem) -> None:
        """Compute what every stretch would hold: `_PLACES`² of them at most."""
        self.problem = problem
        self._live = _live(problem)
        self._places = _chosen_places(problem, self._live)
        count = len(self._places)
        self._plain = [
            int(self._live[start:stop].max(initial=0))
            for start, stop in zip(self._places, self._places[1:], strict=False)
        ]
        self._inner = np.zeros((count, count), np.int64)
        self._whole = np.zeros((count, count), np.int64)
        self._joined = np.zeros((count, count), np.int64)
        self._end = [0] * count  # per place, the number of places up to which all steps are free
        self._before = np.zeros(count, np.int64)
        for place in range(count):
            self._fill(place)
        extra = [[problem.extra(step, count) for step in range(len(problem.free))] for count in problem.counts]
        self._added = [np.cumsum([0, *(round(_SECOND * seconds) for seconds in row)]) for row in extra]
        self._joining = np.rint(_SECOND * problem.byte_seconds * self._joined).astype(np.int64)

    def minimum_bytes(self) -> int:
        """The smallest limit that can be kept."""
        best: NDArray[np.int64] = np.full(len(self._places), _NEVER)
        best[0] = 0
        for place in range(len(self._places)):
            if place:
                best[place] = min(best[place], max(best[place - 1], self._plain[place - 1]))
            if self.problem.counts:
                ends = slice(place + 1, self._end[place])
                peaks = self._peaks(place, self.problem.counts[-1])
                best[ends] = np.minimum(best[ends], np.maximum(peaks, best[place]))
        return int(best[-1])

    def within(self, limit: int) -> Chunking | None:
        """The stretches that add least time with no more than `limit` bytes alive; None where there are none."""
        count = len(self._places)
        best: NDArray[np.int64] = np.full(count, _NEVER)
        best[0] = 0
        came = np.zeros(count, np.int64)
        chunks = np.ones(count, np.int64)
        for place in range(count):
            if place and self._plain[place - 1] <= limit and best[place - 1] <= best[place]:
                best[place], came[place], chunks[place] = best[place - 1], place - 1, 1
            if best[place] >= _NEVER:
                continue
            ends = slice(place + 1, self._end[place])
            for index, number in enumerate(self.problem.counts):
                added = self._added[index]
                total = best[place] + added[self._places[ends]] - added[self._places[place]]
                total += self._joining[place, ends]
                better = (self._peaks(place, number) <= limit) & (total < best[ends])
                best[ends] = np.where(better, total, best[ends])
                came[ends] = np.where(better, place, came[ends])
                chunks[ends] = np.where(better, number, chunks[ends])
        if best[-1] >= _NEVER:
            return None
        found: list[Stretch] = []
        peak, place = 0, count - 1
        while place:
            start, number = int(came[place]), int(chunks[place])
            if number > 1:
                found.append(Stretch(self._places[start], self._places[place], number))
                peak = max(peak, int(self._peaks(start, number)[place - start - 1]))
            else:
                peak = max(peak, self._plain[start])
            place = start
        return Chunking(tuple(reversed(found)), peak, int(best[-1]) / _SECOND)

    def _peaks(self, place: int, chunks: int) -> NDArray[np.int64]:
        """Of the stretches that begin at a place, by their ends."""
        ends = slice(place + 1, self._end[place])
        samples = self.problem.samples
        share = self._inner[place, ends] * -(-samples // chunks)
        return np.asarray(self._before[place] + self._whole[place, ends] - (-share // samples))

    def _fill(self, place: int) -> None:
        problem, start = self.problem, self._places[place]
        self._before[place] = sum(item.size for item in problem.storages if item.start < start < item.stop)
        inside = sorted((item for item in problem.storages if item.start >= start), key=lambda item: item.stop)
        live = np.array(problem.workspace, np.int64)
        end, at = place + 1, 0
        while end < len(self._places) and all(problem.free[self._places[end - 1] : self._places[end]]):
            stop = self._places[end]
            while at < len(inside) and inside[at].stop <= stop:
                if inside[at].divides:
                    live[inside[at].start : inside[at].stop] += inside[at].size
                at += 1
            self._inner[place, end] = live[start:stop].max(initial=0)
            end += 1
        self._end[place] = end
        joined = [(value.made + 1, value.last + 1, value.size) for value in problem.values if value.made >= start]
        shared = [(item.start + 1, len(live) + 1, item.size) for item in inside if not item.divides]
        self._joined[place] = profile(len(live) + 1, joined)[self._places]
        self._whole[place] = self._joined[place] + profile(len(live) + 1, shared)[self._places]


def _live(problem: ChunkProblem) -> NDArray[np.int64]:
    spans = [(item.start, item.stop, item.size) for item in problem.storages]
    return profile(len(problem.free), spans) + np.array(problem.workspace, np.int64)


def _chosen_places(problem: ChunkProblem, live: NDArray[np.int64]) -> list[int]:
    """The first and the last place, and of each run of the others, where there are too many, the one alive least."""
    steps = len(problem.free)
    between = [place for place in range(1, steps) if problem.places[place]]
    if len(between) > _PLACES:
        alive = profile(steps + 1, [(item.start + 1, item.stop, item.size) for item in problem.storages])
        runs: Sequence[NDArray[np.int64]] = np.array_split(np.array(between), _PLACES)
        between = [int(run[np.argmin(alive[run])]) for run in runs]
    return [0, *between, steps] if steps else [0]
