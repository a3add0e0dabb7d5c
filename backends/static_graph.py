"""A bound function as one CUDA graph: one launch for all kernels; its pool is the arena and what operators take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

log = logging.getLogger("memopt")

Run = Callable[..., list[Any]]


class Replay:
    """Captures a function at its first call and replays the graph at later ones.

    Inputs that the caller may change (`copied`) are copied into memory of the graph's; all others are read where they
    lie, and a new address means a new capture. Results are copied out, so that a caller may hold them. Where nothing
    can be captured (a result is an input or a part of another one, an operator waits for the device), the function
    runs as it is.
    """

    def __init__(self, run: Run, copied: Sequence[int]) -> None:
        """Take the function, and the positions of the inputs to copy."""
        self._run, self._copied = run, tuple(copied)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []
        self._outputs: list[Any] = []
        self._key: tuple[Any, ...] = ()
        self._impossible = False

    def __call__(self, *values: Any) -> list[Any]:
        """Run on the current stream."""
        if self._impossible:
            return self._run(*values)
        key = tuple(_address(value) for index, value in enumerate(values) if index not in self._copied)
        if self._graph is None or key != self._key:
            self._graph = None  # a graph that failed to be captured anew must not be replayed
            self._capture(values)
            self._key = key
            if self._impossible:
                return self._run(*values)
        for index in self._copied:
            self._inputs[index].copy_(values[index])
        assert self._graph is not None
        self._graph.replay()
        return [_copy(value) for value in self._outputs]

    def _capture(self, values: Sequence[Any]) -> None:
        try:
            self._inputs = [_copy(value) if index in self._copied else value for index, value in enumerate(values)]
        except RuntimeError:
            self._give_up("an input overlaps itself")
            return
        outputs = self._run(*self._inputs)  # what libraries set up once must not be part of the graph
        if not all(isinstance(value, torch.Tensor) and value.is_cuda for value in outputs):
            self._give_up("a result is not on the device")
            return
        places = [value.untyped_storage().data_ptr() for value in outputs]
        known = {value.untyped_storage().data_ptr() for value in self._inputs if isinstance(value, torch.Tensor)}
        if len(set(places)) < len(places) or known.intersection(places):
            self._give_up("a result shares memory with another one or with an input")
            return
        del outputs
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self._outputs = self._run(*self._inputs)
            for value in self._outputs:
                _copy(value)
        except RuntimeError as error:
            self._give_up(str(error).splitlines()[0])
            return
        self._graph = graph

    def _give_up(self, reason: str) -> None:
        log.info("no CUDA graph is used: %s", reason)
        self._impossible, self._inputs, self._outputs = True, [], []


def _copy(value: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value)


def _address(value: Any) -> Any:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value
