"""Device work that begins before it is known that a call is like the one before.

A compiled call's guards take the host about as long as a small model takes the device, which would wait for them. A
CUDA graph writes to memory of its own and to nothing else: so it is started on the call's inputs at once, and the
guards are asked while it runs. Its results are taken where the call then comes to the very function that was started,
with the very tensors; anywhere else they are dropped, and the call goes its way as if nothing had been started.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from memopt.torch_compat.dispatch import function_modes

_ATTEMPTS = 3  # calls in which no function is met that can be started, after which none is looked for
_REST = 16  # calls that are not started early after one that was in vain

_met = threading.local()


class Startable(Protocol):
    """A compiled function that can be started before it is called."""

    def begin(self, given: Sequence[torch.Tensor]) -> bool:
        """Start on the caller's tensors; whether that was done. Until `end` the calls of other threads wait."""

    def end(self) -> bool:
        """Let others in; whether a call has taken what was started."""


def meet(function: Startable, values: Sequence[Any], positions: Sequence[int]) -> None:
    """Told by a function that can be started, when it is called.

    Args:
        function: it.
        values: what it is called with.
        positions: of the caller's tensors among the values, those that `begin` takes.
    """
    met = getattr(_met, "calls", None)
    if met is not None:
        met.append((function, [values[index] for index in positions]))


class EarlyStart:
    """How the calls of one compiled graph are started early, once one was watched."""

    def __init__(self) -> None:
        """Nothing is known before the first call."""
        self._function: Callable[[], Startable | None] = _nothing
        self._places: list[int | str] = []  # of the function's tensors among a call's arguments
        self._likes: list[Any] = []
        self._inference = False
        self._left = _ATTEMPTS
        self._rest = 0
        self._begun: Startable | None = None
        self._by = 0  # the thread that began

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Start on the arguments of a call, where they are like those of the one that was watched.

        Returns:
            Whether the function was started: then `end` must follow.
        """
        function = self._function()
        if function is None or not self._is_usual():
            return False
        try:
            given = [args[place] if isinstance(place, int) else kwargs[place] for place in self._places]
        except (IndexError, KeyError):
            return False
        if [_like(value) for value in given] != self._likes or not function.begin(given):
            return False
        self._begun, self._by = function, threading.get_ident()
        return True

    def end(self) -> None:
        """After a call, or where it failed: drop what was started and not taken."""
        if self._begun is None or self._by != threading.get_ident():
            return
        function, self._begun, self._by = self._begun, None, 0
        if not function.end():
            self._rest = _REST

    def run(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call, and see which function can be started where that is not known yet."""
        if not self._left or self._function() is not None:
            return call(*args, **kwargs)
        with _watched() as met:
            result = call(*args, **kwargs)
        self._learn(met, args, kwargs)
        return result

    def _is_usual(self) -> bool:
        """Whether copies may be made here as in the call that was watched."""
        if self._rest:
            self._rest -= 1
            return False
        return torch.is_inference_mode_enabled() == self._inference and not function_modes()

    def _learn(self, met: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._left -= 1
        if len(met) != 1:
            return
        function, given = met[0]
        known: dict[int, int | str] = {id(value): name for name, value in kwargs.items()}
        known |= {id(value): index for index, value in enumerate(args)}
        if all(id(value) in known for value in given):
            self._function, self._left = weakref.ref(function), _ATTEMPTS
            self._places = [known[id(value)] for value in given]
            self._likes = [_like(value) for value in given]
            self._inference = torch.is_inference_mode_enabled()


@contextlib.contextmanager
def _watched() -> Iterator[list[tuple[Startable, Sequence[torch.Tensor]]]]:
    """Collects what this thread's calls meet."""
    calls: list[tuple[Startable, Sequence[torch.Tensor]]] = []
    _met.calls = calls
    try:
        yield calls
    finally:
        _met.calls = None


def _like(value: Any) -> Any:
    """What a tensor must have in common with another one; of anything else, nothing that a tensor has."""
    if type(value) is not torch.Tensor:
        return type(value)
    return value.shape, value.stride(), value.dtype, value.device


def _nothing() -> None:
    return None
