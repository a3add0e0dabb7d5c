"""What the allocator holds beyond a moment, in code that is not ours: until backward, or somebody else measures."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Sequence

import torch

from memopt.memory.allocator_events import Life, Recording, is_profiled
from memopt.memory.distributed import has_group
from memopt.memory.live_tensors import live_blocks
from memopt.torch_compat.storages import id_of_storage


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes beyond what was allocated when a window was opened, or when forward ended where that is within it.

    Attributes:
        peak: the most at once.
        live: when it was closed.
        whole: the most at once from when it was opened until backward was over; None where that was not seen.
        behind: of the whole, what was held at once after backward had left the model's graphs; 0 if it did not.
        inside: of the whole, what was held at once before.
        after: all of the process at once from when backward was over, at most, until the window was closed, or another
            backward began; 0 where that was not seen. All the time where no backward came.
        after_forward: the same, beyond all of the process as forward ended; below 0 where less was held.
        again: all of the process as other backwards reached the graph, each beyond the same of the first.
        together: all of the process at once while backward was behind the graphs, at most: what was there before the
            window, and went, is not in it; 0 where that was not seen.
        kept: of what is live, what is there when backward is over, too.
        renewed: the peak of a step that begins with what the step before has kept, until all of that is made anew.
        places: on CPU, addresses of what was made since the window was opened, and is there when it is closed.
    """

    peak: int = 0
    live: int = 0
    whole: int | None = None
    behind: int = 0
    inside: int = 0
    after: int = dataclasses.field(default=0, compare=False)
    after_forward: int = dataclasses.field(default=0, compare=False)
    again: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    together: int = dataclasses.field(default=0, compare=False)
    renewed: int = dataclasses.field(default=0, compare=False)
    kept: int = dataclasses.field(default=0, compare=False)
    places: frozenset[int] = dataclasses.field(default=frozenset(), compare=False)


def unseen(device: torch.device) -> str:
    """Where the allocator is not looked at, in words; empty where it is.

    Collectives end in threads of their own; and where another thread than the main one ends, torch's profiler is left
    without it, and the process ends in a segmentation fault.
    """
    if device.type == "cuda":
        return ""
    if has_group():
        return "in processes that work together"
    if threading.current_thread() is not threading.main_thread():
        return "in another thread than the main one"
    return ""


class Window:
    """Looks at the allocator of one device from now until backward begins.

    On CPU by its events in this thread, which are read once backward is over, unless that is `unseen`; what the process
    holds from there until it is closed is seen, too. On CUDA by its own counts, which are the user's to reset and are
    let stand: of a peak that is no new one it is known that it was no higher than before.
    """

    def __init__(self, device: torch.device, known: Iterable[torch.UntypedStorage]) -> None:
        """Open it.

        Args:
            device: CPU or a CUDA device.
            known: on CPU, what is there already and is seen to go.
        """
        self._device = device
        self._recording: Recording | None = None
        self._held: Held | None = None
        self._there = 0  # on CPU, bytes of the whole process as it was opened
        self.backward = self.over = False  # whether backward has begun, and is over
        self._again = 0  # backwards since then through the same graph
        if device.type == "cuda":
            self._before = self._start = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        elif not unseen(device) and not is_profiled():
            known, there = list(known), live_blocks(device)
            self._there = sum(block.nbytes for block in there.values())
            self._recording = Recording(device, known, yields=True)
            counted = set(map(id_of_storage, known))
            others = (block.storage() for key, block in there.items() if key not in counted)
            self._recording.knows(storage for storage in others if storage is not None)
            self._recording.begin()

    def forward_ends(self) -> None:
        """What is held now is what later figures are beyond, but for that of the whole."""
        if self._device.type == "cuda":
            device = self._device
            self._before = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        self._mark(_FORWARD)

    def backward_begins(self) -> None:
        """What comes now is only a part of the whole."""
        self.backward = True
        if self._device.type == "cuda":
            self.close()
        self._mark(_MARK)

    def graphs_end(self) -> None:
        """What comes now is behind the model's graphs, in their backward; of several times the last one counts."""
        self._mark(_BEHIND)

    def backward_ends(self) -> None:
        """What comes now is the loop's, with all that the process holds."""
        self.over = True
        if self._device.type == "cuda" and self._held is not None:
            allocated, most = self._start
            peak = torch.cuda.max_memory_allocated(self._device)
            self._held = dataclasses.replace(self._held, whole=peak - allocated if peak > most else None)
        self._mark(_OVER)

    def another_begins(self) -> bool:
        """Another backward runs through the same graph; whether it is seen what is there now. No more is looked at."""
        self._again += 1
        if self._again <= _BACKWARDS:
            self._mark(f"{_ANOTHER} {self._again}")
        return self._again <= _BACKWARDS

    def _mark(self, name: str) -> None:
        if self._recording is not None:
            self._recording.mark(name)

    def close(self) -> Held | None:
        """What was held until backward began, or by now; None where that cannot be said. It may be asked again."""
        if self._held is None and self._device.type == "cuda":
            allocated, most = self._before
            live, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
            most_held = max(peak - allocated if peak > most else 0, live - allocated, 0)
            self._held = Held(most_held, live - allocated, renewed=most_held)
        elif self._held is None and self._recording is not None:
            self._recording.end()
            if self._recording.ended:
                self._held, self._recording = _of(self._recording, self._there), None
        return self._held


def closed_if_it_fails(window: Window | None) -> contextlib.AbstractContextManager[None]:
    """Within, a call runs that a window looks at, if any: no more if it fails."""
    return contextlib.nullcontext() if window is None else _closed_if_it_fails(window)


@contextlib.contextmanager
def _closed_if_it_fails(window: Window) -> Iterator[None]:
    try:
        yield
    except BaseException:
        window.close()
        raise


_FORWARD, _MARK, _BEHIND, _OVER = "forward ends", "backward begins", "graphs end", "backward ends"
_ANOTHER = "another backward begins"
_BACKWARDS = 32  # through one graph, that are looked at


def _of(recording: Recording, there: int) -> Held:
    names = _FORWARD, _MARK, _BEHIND, _OVER
    begin, until, left, over = (recording.marks.get(name) for name in names)
    others = [when for name, when in recording.marks.items() if str(name).startswith(_ANOTHER)]
    another = others[0] if others else None
    times = [when for when, _ in recording.changes]
    sums = [0, *itertools.accumulate(size for _, size in recording.changes)]
    first = 0 if begin is None else bisect.bisect_left(times, begin)
    last = len(times) if until is None else bisect.bisect_left(times, until)
    if over is None:
        whole, inside, behind, together = None, 0, 0, 0
    else:
        end = bisect.bisect_left(times, over)
        way = end if left is None else bisect.bisect_left(times, left)
        inside, behind = max(sums[: way + 1]), max(sums[way : end + 1]) if way < end else 0
        together = there + _most(recording.all_changes, left, over) if left is not None and way < end else 0
        whole = max(inside, behind)
    alone = over if until is not None else begin or 0
    after = 0 if alone is None else there + _most(recording.all_changes, alone, another)
    after_forward = 0 if alone is None else after - there - _most(recording.all_changes, begin or 0, begin or 0)
    again = () if until is None else tuple(_grown(recording.all_changes, until, when) for when in others)
    peak, live = max(sums[first : last + 1]) - sums[first], sums[last] - sums[first]
    renewed, kept = (
        (peak, 0) if until is None else peak_with_old(times[:last], sums[: last + 1], first, recording.lives, over)
    )
    return Held(
        peak, live, whole, behind, inside, after, after_forward, again, together, renewed, kept, recording.places
    )


def peak_with_old(
    times: Sequence[int], sums: Sequence[int], first: int, lives: Sequence[Life], over: int | None
) -> tuple[int, int]:
    """The most bytes at once beyond a moment in a step that begins with what the one before has kept; and that.

    Variables hold it until they are set anew: no later than when all of it is made.

    Args:
        times: of changes, up to backward's beginning.
        sums: bytes before each change, and behind the last.
        first: the moment: how many changes come before it.
        lives: of blocks.
        over: when backward was over: what is there then is kept. None: what is there in the end.
    """
    since = times[first:]
    kept = [
        (made, size)
        for made, gone, size in lives
        if since and since[0] <= made <= since[-1] and (gone is None or (over is not None and gone >= over))
    ]
    last, old = max((made for made, _ in kept), default=-1), sum(size for _, size in kept)
    most = sums[first] + old
    for when, held in zip(since, sums[first + 1 :], strict=True):
        most = max(most, held + old if when <= last else held)
    return most - sums[first], old


def _grown(changes: Sequence[tuple[int, int]], first: int, last: int) -> int:
    """Bytes by which more is there at one time than at an earlier one."""
    return sum(size for when, size in changes if first <= when < last)


def _most(changes: Sequence[tuple[int, int]], first: int, last: int | None) -> int:
    """The most bytes at once within a time, above the beginning of all changes; `last` is None for their end."""
    times, sums = [when for when, _ in changes], [0, *itertools.accumulate(size for _, size in changes)]
    end = len(times) if last is None else bisect.bisect_left(times, last)
    return max(sums[bisect.bisect_left(times, first) : end + 1])
