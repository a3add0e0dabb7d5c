"""CUDA graphs of functions, one after the other in one pool, drawing random numbers as the functions do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memopt.backends.cuda_graph import capturing, leave_capture, new_graph
from memopt.cuda_graphs.copies import like
from memopt.cuda_graphs.step import Call, NotCapturable
from memopt.errors import first_line
from memopt.torch_compat.cuda_memory import free_workspaces

log = logging.getLogger("memopt")


class CudaGraphCapturer:
    """Captures on the current stream of the current device; see `memopt.cuda_graphs.pool.GraphCapturer`."""

    def __init__(self) -> None:
        """The pool is there with the first CUDA graph."""
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None  # of the latest use

    def capture(self, run: Call, arguments: list[Any]) -> tuple[Callable[[], None], Sequence[Any]]:
        """Capture a function of a list of arguments, which is emptied, as a CUDA graph in the pool.

        Raises:
            NotCapturable: it waits for the device, takes or returns what is elsewhere, or memory is short.
        """
        given = [value for value in arguments if isinstance(value, torch.Tensor)]
        if not all(value.is_cuda or value.is_pinned() for value in given):  # a float that a schedule sets is one
            raise NotCapturable("an argument is on the host: its value would be the same in every replay")
        del given
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = new_graph(), torch.cuda.current_stream()
        results: Sequence[Any] = ()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        before, reason = generator.clone_state(), ""
        try:
            with capturing(graph, pool):
                results = run(arguments)
        except RuntimeError as error:
            reason = _cause(error)
            leave_capture(pool, stream)
            self._pool = None
            generator.graphsafe_set_state(before)  # its own state is as if the capture still went on
        tensors = [value for value in results if isinstance(value, torch.Tensor)]
        if not reason and not all(value.is_cuda or value.is_pinned() for value in tensors):
            reason = "a result is not on the device"
        if reason:
            log.info("a graph is not captured: %s", reason)
            raise NotCapturable(reason)

        return graph.replay, results

    def enter(self) -> None:
        """The pool is about to be used on the current stream: what another one does with it comes first."""
        current = torch.cuda.current_stream()
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    def drawn(self) -> int:
        """How far the device's generator has come; a replay takes it on."""
        return int(torch.cuda.default_generators[torch.cuda.current_device()].get_offset())

    def draw_from(self, place: int) -> None:
        """Take the device's generator back to where it was."""
        torch.cuda.default_generators[torch.cuda.current_device()].set_offset(place)

    def blank(self, value: torch.Tensor) -> torch.Tensor:
        """Memory for a copy of a tensor: while a capture is under way, of its pool."""
        return like(value)

    def begin(self) -> None:
        """Buffers of cuBLAS are taken in the pool from now on, of the size that they have outside."""
        free_workspaces()

    def end(self) -> None:
        """They are free in the pool."""
        free_workspaces()

    def release(self) -> None:
        """Give the pool back, once nothing holds a CUDA graph."""
        self.end()
        self._pool = self._stream = None
        torch.cuda.empty_cache()


def _cause(error: BaseException) -> str:
    """What is said of a capture that failed: that memory ran out, where that came before, as it breaks a capture."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, torch.OutOfMemoryError):
        seen = seen.__context__
    return first_line(seen or error)
