"""What the allocator of a device does while a stretch of code runs, as torch's profiler tells it."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from memopt.common.quiet import without_lines
from memopt.torch_compat import profilers
from memopt.torch_compat.allocator_lines import unknown_blocks_unsaid
from memopt.torch_compat.backward import backward_task
from memopt.torch_compat.profilers import before_profilers, begin_memory_profile, end_memory_profile

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Trace(Generic[T]):
    """The allocator's events during a call.

    Attributes:
        value: what the call returned.
        seconds: wall time, the device's work included.
        changes: (nanoseconds, signed bytes) of each allocation and release on the device, in order of time. On CPU,
            memory that was allocated before the call has no events.
    """

    value: T
    seconds: float
    changes: tuple[tuple[int, int], ...]


_MARKS_BYTES = 4097  # of the smallest block that is a mark
# What the profiler says of each profile.
_CHATTER = ("USDT:", "SyncActivityProfilerHandler", "ActivityProfilerController")


class MeasuringError(RuntimeError):
    """Memory is to be measured while something else measures: the message says what to do."""


def is_profiled() -> bool:
    """Whether a profiler is active in this thread, beside which no memory can be measured.

    A `Recording` that yields is none: it ends here, but for one of another thread, which only that can end. A profile
    that began meanwhile would have the process end as it does.
    """
    if _yielding:
        _yielding[0].end()
    return bool(_yielding) or profilers.is_running()


# Of a block: when it was made, when it went, if it did, and its bytes.
Life = tuple[int, int | None, int]

_yielding: list[Recording] = []  # the one that ends where something else is to be measured


class Recording:
    """The allocator's events of one device in this thread, from `begin` to `end`, or within `with`."""

    def __init__(
        self, device: torch.device, known: Iterable[torch.UntypedStorage] = (), *, yields: bool = False
    ) -> None:
        """Nothing is recorded yet.

        Args:
            device: whose allocator is looked at.
            known: on CPU, what was allocated before and whose release counts. The allocator tells of it only where a
                recording has seen the same address allocated, whoever had it then.
            yields: whether it ends by itself where somebody else is about to measure or to profile.
        """
        self.device = device
        self._yields = yields
        self._sizes: list[int] = []  # of what is known, bytes
        self._known: list[weakref.ref[torch.UntypedStorage]] = []
        self._note_releases(known)
        self._counted = len(self._sizes)  # of what is known, as many count in `changes`
        self._active = False
        # Of each mark its name (of a release the number of what is known), and address and bytes of its block.
        self._marked: list[tuple[str | int, int, int]] = []
        self._undo: Callable[[], None] | None = None
        self._unsaid = contextlib.ExitStack()  # lets the allocator speak again
        self._thread = self._task = 0
        self._trace: tuple[tuple[tuple[int, int], ...], dict[str | int, int]] = ((), {})
        self._others: list[tuple[int, int]] = []  # changes of what counts in `all_changes` alone
        self.places = frozenset[int]()  # on CPU, addresses of what was made meanwhile and is there in the end
        self.lives: tuple[Life, ...] = ()  # on CPU, of what was made meanwhile

    def knows(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Of these, too, which were allocated before it begins, the release counts in `all_changes`."""
        self._note_releases(storages)

    def _note_releases(self, storages: Iterable[torch.UntypedStorage]) -> None:
        for storage in storages:
            released = functools.partial(_untraced_release(), weakref.ref(self), len(self._sizes))
            self._sizes.append(storage.nbytes())
            self._known.append(weakref.ref(storage, released))

    def begin(self) -> None:
        """Look at the allocator from now on.

        Raises:
            MeasuringError: a profiler is already active.
        """
        if is_profiled():
            raise MeasuringError(
                "memory cannot be measured in this thread while another one is in a loop within a budget: plan there, "
                "or leave this thread's budget out"
                if _yielding
                else "memory cannot be measured while a profiler is active: leave it first"
            )
        self._thread, self._task = threading.get_ident(), backward_task()
        with contextlib.ExitStack() as unsaid, without_lines(*_CHATTER):
            unsaid.enter_context(unknown_blocks_unsaid())
            begin_memory_profile()
            self._active, self._unsaid = True, unsaid.pop_all()
        atexit.register(self.end)  # a process that ends while memory is recorded ends in a segmentation fault
        if self._yields:
            _yielding[:] = [self]
            self._undo = before_profilers(self.end)

    def end(self) -> None:
        """Look no more; in another backward pass, or another thread, than it was begun in, nothing happens.

        Autograd sets back what is in force in a thread when it is done, profilers too.
        """
        if not self._active or threading.get_ident() != self._thread or backward_task() != self._task:
            return
        self._active = False
        atexit.unregister(self.end)
        if self._undo is not None:
            self._undo()
            _yielding.clear()
        with self._unsaid, without_lines(*_CHATTER):
            results = end_memory_profile()
        events, marks = _without_marks(_memory_events(results), self._marked)
        if self.device.type == "cuda":
            changes = _changes_cuda(results, self.device)
        else:
            gone = {number: (when, -self._sizes[number]) for number, when in marks.items() if isinstance(number, int)}
            there: dict[int, tuple[int, int]] = {}
            lives = list[Life]()
            released = [change for number, change in gone.items() if number < self._counted]
            self._others = [change for number, change in gone.items() if number >= self._counted]
            changes = [*_changes_cpu(events, there, lives), *released]
            self.places = frozenset(there)
            self.lives = (*lives, *((made, None, size) for made, size in there.values()))
        self._known.clear()
        self._trace = tuple(sorted(changes, key=lambda change: change[0])), marks

    def mark(self, name: str | int) -> None:
        """Note this moment, unless it has ended or this is another thread; no dispatch mode of the user's sees it."""
        if self._active and threading.get_ident() == self._thread:
            size = _MARKS_BYTES + len(self._marked) % _MARKS_BYTES
            block = torch.UntypedStorage(size, device="cpu")  # type: ignore[no-untyped-call]
            self._marked.append((name, block.data_ptr(), size))

    @property
    def ended(self) -> bool:
        """Whether it has ended, or never began."""
        return not self._active

    def __enter__(self) -> Recording:
        self.begin()
        return self

    def __exit__(self, *_: Any) -> None:
        self.end()

    @property
    def changes(self) -> tuple[tuple[int, int], ...]:
        """As of `Trace`, once it has ended."""
        return self._trace[0]

    @property
    def all_changes(self) -> list[tuple[int, int]]:
        """The same with releases of all that it knows of, once it has ended."""
        return sorted([*self.changes, *self._others], key=lambda change: change[0])

    @property
    def marks(self) -> dict[str | int, int]:
        """Nanoseconds at each of `mark`, by name, once it has ended; of several of a name the last."""
        return self._trace[1]

    @property
    def peak(self) -> int:
        """The most bytes at once, above the beginning."""
        return max((0, *itertools.accumulate(size for _, size in self.changes)))


def record(fn: Callable[[], T], device: torch.device) -> Trace[T]:
    """Call `fn()` under the profiler and return what the allocator of `device` did in this thread.

    Raises:
        MeasuringError: a profiler is already active.
        Exception: whatever `fn` raises; the profiler is stopped by then.
    """
    with Recording(device) as recording:
        began = time.perf_counter()
        value = fn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
    return Trace(value, seconds, recording.changes)


def _changes_cuda(results: Any, device: torch.device) -> list[tuple[int, int]]:
    return [
        (event.start_ns(), event.nbytes())
        for event in results.events()
        if event.name() == "[memory]" and profilers.is_of_cuda(event) and event.device_index() == device.index
    ]


def _memory_events(results: Any) -> list[Any]:
    blocks = [event for event in _flatten(results.experimental_event_tree()) if event.name == "[memory]"]
    return sorted(blocks, key=lambda event: int(event.start_time_ns))


def _without_marks(
    events: list[Any], marked: list[tuple[str | int, int, int]]
) -> tuple[list[Any], dict[str | int, int]]:
    """The events but those of marks, which are blocks of odd sizes that went at once; when each mark was made."""
    others: list[Any] = []
    marks: dict[str | int, int] = {}
    following, gone = iter(marked), 0
    name, place, size = next(following, ("", 0, 0))
    for event in events:
        block = event.extra_fields
        if block.ptr == gone and gone and block.alloc_size < 0:
            gone = 0
        elif place and (block.ptr, block.alloc_size) == (place, size):
            marks[name], gone = event.start_time_ns, place
            name, place, size = next(following, ("", 0, 0))
        else:
            others.append(event)
    return others, marks


def _changes_cpu(events: list[Any], alive: dict[int, tuple[int, int]], lives: list[Life]) -> Iterator[tuple[int, int]]:
    """Changes with addresses: a release of one never seen allocated carries the size of some earlier tenant.

    Args:
        events: in order of time.
        alive: takes when what is there in the end was made, and its bytes, by address.
        lives: takes when each other block was made and went, and its bytes.
    """
    for event in events:
        block, when = event.extra_fields, event.start_time_ns
        if block.device.type != "cpu" or (block.alloc_size < 0 and block.ptr not in alive):
            continue
        if block.alloc_size > 0:
            alive[block.ptr] = when, block.alloc_size
            yield when, block.alloc_size
        else:
            made, size = alive.pop(block.ptr)
            lives.append((made, when, size))
            yield when, -size


def _released(recording: weakref.ref[Recording], number: int, _: object) -> None:
    """What is known under this number has gone."""
    here = recording()
    if here is not None:
        here.mark(number)


@functools.cache
def _untraced_release() -> Callable[..., None]:
    """`_released` where Dynamo looks at every frame, as between two graphs of a call: it would trace this one."""
    return torch.compiler.disable(_released)  # type: ignore[no-untyped-call,no-any-return]


def _flatten(events: list[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        yield event
