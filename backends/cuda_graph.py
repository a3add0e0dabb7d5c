"""A bound function as one CUDA graph: one launch for all kernels; its pool is all the memory that its kernels take."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from memopt.cuda_graphs.copies import copy
from memopt.errors import first_line
from memopt.memory.allocator import OWN_SEGMENT, own_segment
from memopt.memory.allocator_limit import lifted
from memopt.memory.places import places_of, same_places
from memopt.torch_compat.cuda_memory import free_workspaces, leave_pool

_UNIT = 2 * 2**20  # in which a device's memory is given
_GROWTH = 20 * 2**20  # bytes by which a pool grows, if it does
_FOR_A_GENERATOR = 2  # small blocks that it takes when a capture begins
_WORKSPACE, _SMALL = "CUBLAS_WORKSPACE_CONFIG", ":4096:1"  # KiB, and how many

log = logging.getLogger("memopt")

Run = Callable[..., Sequence[Any]]
Copy = Callable[[torch.Tensor], torch.Tensor]
Finish = Callable[[Sequence[torch.Tensor], Sequence[Any], Copy], list[Any]]


class Replay:
    """Captures a function at its first call and replays the graph at later ones.

    Inputs that the caller may change (`copied`) are copied into memory of the graph's; all others are read where they
    lie, and a new address means a new capture. Results are copied out, so that a caller may hold them. Where nothing
    can be captured (a result is an input or a part of another one, an operator waits for the device), the function
    runs as it is. The graph's memory is one segment, as small as the allocator can cut all large blocks from: trial
    captures find its size.

    Attributes:
        impossible: why no graph is used; empty while one may be.
    """

    def __init__(self, run: Run, copied: Sequence[int], *, finish: Finish | None = None) -> None:
        """Take what is to be captured.

        Args:
            run: the function.
            copied: positions of the inputs to copy.
            finish: makes the results from what the graph returns and the call's inputs, after every replay, with a
                function that copies what must outlive the next; None: all results are copies.
        """
        self._run, self._copied = run, tuple(copied)
        self._finish = finish or _each
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._outputs: Sequence[Any] = []
        self._places: list[int] = []
        self._numbers: list[Any] = []
        self._tensors: list[int] = []
        self._others: list[int] = []
        self._pool: tuple[int, int] = (0, 0)
        self._set_up = 0  # the thread in which libraries have what they set up once
        self._segment: int | None = None  # bytes of the graph's segment; 0: as it comes; None: not known
        self._begun: list[torch.Tensor] | None = None  # what the graph was started on
        self._took = False  # whether a call has taken the results of that
        self.impossible = ""

    def begin(self, given: Sequence[torch.Tensor]) -> bool:
        """Replay the graph before a call, which takes the results if it is on the same tensors.

        Args:
            given: the inputs to copy, like those that the graph was captured with.

        Returns:
            Whether it was replayed: only where all that it reads lies where it lay.
        """
        if self._graph is None or not same_places(self._inputs, self._places, self._tensors):
            return False
        for index, value in zip(self._copied, given, strict=True):
            self._inputs[index].copy_(value)
        self._graph.replay()
        self._begun, self._took = list(given), False
        return True

    def was_used(self) -> bool:
        """Whether a call has taken what was begun; if not, none will."""
        self._begun = None
        return self._took

    def __call__(self, *values: Any) -> list[Any]:
        """Run on the current stream."""
        begun, self._begun = self._begun, None
        if begun is not None and self._is_on(begun, values):
            self._took = True
            return self._finish(self._outputs, values, copy)
        if self.impossible:
            return self._plainly(values)
        if self._graph is None or not self._lies_as_before(values):
            self._graph, self._outputs = None, []  # a graph that failed to be captured anew must not be replayed
            fixed = [index for index in range(len(values)) if index not in self._copied]
            self._tensors = [index for index in fixed if isinstance(values[index], torch.Tensor)]
            self._others = [index for index in fixed if not isinstance(values[index], torch.Tensor)]
            self._capture(values)
            self._places = places_of(list(values))
            self._numbers = [values[index] for index in self._others]
            if self.impossible:
                return self._plainly(values)
        for index in self._copied:
            self._inputs[index].copy_(values[index])
        assert self._graph is not None
        self._graph.replay()
        return self._finish(self._outputs, values, copy)

    def _is_on(self, begun: Sequence[torch.Tensor], values: Sequence[Any]) -> bool:
        """Whether a replay that was begun on these tensors is what a call with these values needs."""
        same = all(values[index] is given for index, given in zip(self._copied, begun, strict=True))
        return same and self._graph is not None and self._lies_as_before(values)

    def _lies_as_before(self, values: Sequence[Any]) -> bool:
        """Whether inputs that are read in place lie where they lay: of hundreds of them that is asked in every call."""
        same = same_places(list(values), self._places, self._tensors)
        return same and self._numbers == [values[index] for index in self._others]

    @property
    def missing_bytes(self) -> int | None:
        """Bytes that the next call takes and keeps: 0 where it has them, or keeps none; None where it is not known."""
        return 0 if self.impossible or self._graph is not None else self._segment or None

    def renewed(self, run: Run) -> Replay:
        """One of a function that does the same in other memory; nothing needs to be found out again."""
        new = Replay(run, self._copied, finish=self._finish)
        new._set_up, new._segment, new.impossible = self._set_up, self._segment, self.impossible
        return new

    def release(self) -> None:
        """Give the graph and its memory back; the next call captures anew."""
        self._graph, self._inputs, self._outputs = None, [], []

    def _plainly(self, values: Sequence[Any]) -> list[Any]:
        return self._finish(self._run(*values), values, _itself)

    def _capture(self, values: Sequence[Any]) -> None:
        try:
            self._inputs = [copy(value) if index in self._copied else value for index, value in enumerate(values)]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            self._give_up("an input overlaps itself")
            return
        with _own_workspaces():
            if self._set_up == threading.get_ident():
                self._finish_capture()
                return
            outputs = self._run(*self._inputs)  # what libraries set up once must not be part of the graph
            if not outputs:  # all is left to `finish`
                self._give_up("there is nothing to capture")
                return
            given = [value for value in values if isinstance(value, torch.Tensor)]
            if not all(value.is_cuda or value.is_pinned() for value in given):  # a float that a schedule sets is one
                self._give_up("an input is on the host: its value would be the same in every replay")
                return
            if not all(isinstance(value, torch.Tensor) and value.is_cuda for value in outputs):
                self._give_up("a result is not on the device")
                return
            places = [value.untyped_storage().data_ptr() for value in outputs]
            known = {value.untyped_storage().data_ptr() for value in self._inputs if isinstance(value, torch.Tensor)}
            if len(set(places)) < len(places) or known.intersection(places):
                self._give_up("a result shares memory with another one or with an input")
                return
            del outputs
            self._finish_capture()
            self._set_up = 0 if self.impossible else threading.get_ident()

    def _finish_capture(self) -> None:
        stream = torch.cuda.current_stream()
        try:
            if self._segment is None:
                with lifted(torch.device("cuda")):
                    self._segment = smallest_segment(self._reserved_with)
            graph, self._outputs = self._captured(self._segment)
            self._finish(self._outputs, self._inputs, copy)
        except RuntimeError as error:
            self._give_up(first_line(error))
            leave_capture(self._pool, stream)
        else:
            self._graph = graph

    def _captured(self, segment: int) -> tuple[torch.cuda.CUDAGraph, Sequence[Any]]:
        """A graph, and what it returns, in a pool of its own that begins with a segment of so many bytes."""
        graph, self._pool = new_graph(), torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # within a capture nothing is given back, so that a limit would be met early
        with _own_workspaces(), _own_random_state(), capturing(graph, self._pool):
            if segment:
                with own_segment():
                    torch.empty(segment, dtype=torch.uint8, device="cuda")  # cut into blocks once it is free
            outputs = self._run(*self._inputs)
        return graph, outputs

    def _reserved_with(self, segment: int) -> int:
        """Bytes of all large segments of a graph's pool that begins with one of so many bytes."""
        graph, outputs = self._captured(segment)
        snapshot: Any = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        found = [item for item in snapshot if tuple(item["segment_pool_id"]) == tuple(self._pool)]
        del graph, outputs  # the next capture gives their memory back
        return sum(item["total_size"] for item in found if item["segment_type"] == "large")

    def _give_up(self, reason: str) -> None:
        log.info("no CUDA graph is used: %s", reason)
        self.impossible = reason
        self.release()


def smallest_segment(reserved: Callable[[int], int]) -> int:
    """The least first segment of a pool, in bytes, with which it takes no other one.

    Args:
        reserved: tells what a pool with such a segment takes in all; without one for 0.

    Returns:
        The size, or 0 where no first segment makes the pool smaller.
    """
    most, found = reserved(0), 0
    low, high = max(OWN_SEGMENT, most - _GROWTH) // _UNIT, -(-most // _UNIT)
    while low < high:
        middle = (low + high) // 2
        if reserved(middle * _UNIT) <= middle * _UNIT:
            found = high = middle
        else:
            low = middle + 1
    return found * _UNIT


def new_graph() -> torch.cuda.CUDAGraph:
    """A graph whose memory is not given back before the device has done all that it was asked for.

    Segments that grow are unmapped once the stream of the capture is idle: replays on others may still be under way.
    """
    graph = torch.cuda.CUDAGraph()
    weakref.finalize(graph, _finish_work, torch.cuda.current_device(), os.getpid()).atexit = False
    return graph


def _finish_work(device: int, process: int) -> None:
    if process != os.getpid():  # a copy of the process has no device
        return
    if not torch.cuda.is_current_stream_capturing():  # where nothing may be waited for, nor is anything given back
        torch.cuda.synchronize(device)


def leave_capture(pool: tuple[int, int], stream: torch.cuda.Stream) -> None:
    """Leave a capture that failed at its end: PyTorch stays on its stream and in its pool.

    Nothing else can be captured in the pool: PyTorch's allocator of host memory stays in it.
    """
    if torch.cuda.current_stream() == stream:
        return
    torch.cuda.set_stream(stream)
    device = torch.cuda.current_device()
    with contextlib.suppress(RuntimeError):  # where PyTorch did so itself
        leave_pool(device, pool)


@contextlib.contextmanager
def _own_random_state() -> Iterator[None]:
    """The device's generator has a state for a capture alone, which draws nothing.

    A capture that fails leaves the state that it began with as if it still went on: whoever drew numbers next on the
    device would be refused.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what the current stream is asked for, in a pool.

    Other threads may do as they like meanwhile: backward runs in one of autograd's.

    Raises:
        RuntimeError: something cannot be captured, or memory is short.
    """
    stream = _capture_stream(torch.cuda.current_device())
    held = _available_to_begin(stream)
    with _no_warning(), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield
    del held


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _available_to_begin(stream: torch.cuda.Stream) -> list[torch.Tensor]:
    """Blocks between which there is room for what a generator allocates as it is registered with a capture.

    Where PyTorch (2.11, say) finds none for that, it ends the process: the graph takes its leave of a generator that
    does not know it yet. As long as these blocks are held, the free ones between them are not given back.
    """
    with torch.cuda.stream(stream):
        blocks = [torch.empty(1, dtype=torch.long, device="cuda") for _ in range(_FOR_A_GENERATOR + 2)]
    del blocks[1:-1]
    return blocks


@contextlib.contextmanager
def _no_warning() -> Iterator[None]:
    """PyTorch does not warn that a graph is empty.

    It does so where memory runs out before the first kernel, too: as an error, that would hide the one that says so.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


@contextlib.contextmanager
def _own_workspaces() -> Iterator[None]:
    """CuBLAS's buffers that are allocated within are small, and given back after: those of a graph stay in its pool.

    PyTorch takes 32 MiB for each stream on Hopper, and reads the size from the environment whenever it takes one.
    """
    free_workspaces()
    chosen = os.environ.get(_WORKSPACE)
    os.environ[_WORKSPACE] = chosen or _SMALL
    try:
        yield
    finally:
        free_workspaces()
        if chosen is None:
            del os.environ[_WORKSPACE]


def _each(outputs: Sequence[torch.Tensor], values: Sequence[Any], copy: Copy) -> list[Any]:
    return [copy(value) for value in outputs]


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value
